"""A target engine without a model: the whole protocol, deterministic tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared.errors import CoppiceError, InvalidArgumentError, NotFoundError, StaleStateError
from shared.messages import (
    AcceptedPath,
    AnswerTimes,
    Credit,
    CreditUpdate,
    DraftDetached,
    DraftRound,
    FeatureAck,
    FeatureChunk,
    FeatureFailure,
    FeatureSpec,
    FeatureSubscribe,
    FeatureUnsubscribe,
    FinishReason,
    PeerAttach,
    PeerDetach,
    PeerTrees,
    RequestRetracted,
    RingSpan,
    RootOnly,
    TargetAdmitted,
    TargetClose,
    TargetOpen,
    TokenLogprob,
    TokenTree,
    VerifyRound,
    WorkerInfo,
    WorkerLoad,
)
from shared.peer.ring import FeatureRing
from shared.rpc.status import failure_of
from shared.times import clock_id, take
from shared.tree import check_tree
from tests.fakes.model import VOCAB_SIZE, WIDTH, feature_rows, next_token
from tests.fakes.without_peer import WithoutPeer

NUM_PAGES = 1000
FORWARD_NS = 1000  # of a timed round


@dataclass(eq=False)
class _Request:
    open: TargetOpen
    tokens: list[int]
    seq_len: int = 0
    round_idx: int = -1
    last_reply: AcceptedPath | None = None
    next_feature: int | None = None  # None: nobody subscribes
    reads_ring: bool = False
    acknowledged: int = 0
    granted_until: int = 0
    draft_epoch: int = 0  # of the draft that is attached; 0: none
    grant: PeerTrees | None = None  # to order trees of it
    grant_until: int = 0
    num_tokens_sent: int = 0
    ordered_round: int = 0

    @property
    def can_run_alone(self) -> bool:
        """Return whether the next round needs no order."""
        return 0 <= self.round_idx < self.granted_until


@dataclass(eq=False)
class FakeTarget(WithoutPeer):
    """Verify trees against the hash of the tokens so far.

    Args:
        rows_per_chunk: Feature rows per FeatureChunk.
        has_features: Whether requests keep features at all.
        ring: Carries rows to subscribers that can read it.
        channel: Name that drafts channel to; the messages in `attached` are to be carried there.
        logits_hash: What tells it from targets that compute otherwise.
    """

    incarnation: str = "fake-target"
    max_context_len: int = 4096
    rows_per_chunk: int = 16
    has_features: bool = True
    width: int = WIDTH
    eos_token_ids: tuple[int, ...] = ()
    ring: FeatureRing | None = None
    logits_hash: str = "a" * 64
    channel: str = ""
    attached: list[Any] = field(default_factory=list)
    requests: dict[str, _Request] = field(default_factory=dict)
    received: list[Any] = field(default_factory=list)  # every message, in order

    def __post_init__(self) -> None:
        self._early: dict[str, FeatureSubscribe] = {}
        self._outbox: list[Any] = []
        self._queue: list[tuple[_Request, TargetOpen | VerifyRound]] = []
        self._num_steps = self._num_rows = self._num_request_steps = self._num_moved = 0

    @property
    def info(self) -> WorkerInfo:
        spec = FeatureSpec(layer_ids=(0, 1, 2), width=self.width, dtype="float32")
        return WorkerInfo(
            incarnation=self.incarnation,
            model="fake",
            model_hash="f" * 64,
            tokenizer_hash="",
            vocab_size=VOCAB_SIZE,
            max_context_len=self.max_context_len,
            page_size=16,
            dtype="float32",
            device="cpu",
            features=spec if self.has_features else FeatureSpec(),
            kind="target",
            eos_token_ids=self.eos_token_ids,
            load=self.load,
            feature_ring=self.ring.name if self.ring is not None else "",
            peer_socket=self.channel,
            logits_hash=self.logits_hash,
        )

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(
            num_running=len(self.requests),
            num_free_pages=NUM_PAGES - len(self.requests),
            num_pages=NUM_PAGES,
            num_steps=self._num_steps,
            num_rows=self._num_rows,
            num_request_steps=self._num_request_steps,
            num_moved_rounds=self._num_moved,
        )

    @property
    def has_work(self) -> bool:
        runs_alone = any(request.can_run_alone for request in self.requests.values())
        return bool(self._outbox or self._queue or runs_alone)

    def launch_deferred(self) -> None:
        """Do nothing."""

    def check_integrity(self) -> None:
        """There is nothing to leak."""

    def submit(self, message: Any) -> None:
        self.received.append(message)
        self._handle(message)

    def hear(self, message: Any) -> None:
        """Take what a attached draft says."""
        request = self.requests.get(message.request_id)
        if request is None or request.open.target_epoch != message.target_epoch:
            return
        match message:
            case PeerAttach():
                request.draft_epoch, request.grant = message.draft_epoch, None
                request.ordered_round = min(request.ordered_round, request.round_idx)
            case PeerDetach() if request.draft_epoch == message.draft_epoch:
                self.unlink(message.request_id)
            case TokenTree() if request.grant is not None:
                current = (request.draft_epoch, request.round_idx + 1)
                if (message.draft_epoch, message.round_idx) == current:
                    self._take_tree(request, message)

    def _take_tree(self, request: _Request, tree: TokenTree) -> None:
        assert request.grant is not None
        try:
            check_tree(
                tree.token_ids,
                tree.parent_index,
                root_token_id=request.tokens[-1],
                vocab_size=VOCAB_SIZE,
                max_num_nodes=request.grant.shape.num_draft_tokens,
            )
            if tree.seq_len != request.seq_len:
                raise InvalidArgumentError("another seq_len", field="seq_len")
        except CoppiceError as error:
            self._outbox.append(
                failure_of(
                    error,
                    request_id=tree.request_id,
                    target_epoch=tree.target_epoch,
                    round_idx=tree.round_idx,
                )
            )
            return
        times = None
        if request.open.is_timed:
            now = time.monotonic_ns()
            times = AnswerTimes(clock_id=clock_id(), begin_ns=now).including("draft", tree.times)
            times = times.then("forward", times.end_ns + FORWARD_NS)
            times = times.then("commit", times.end_ns)
        self._num_rows += len(tree.token_ids)
        self._commit(request, tree, times)

    def _order_tree(self, request: _Request) -> None:
        """Order the tree of the next round over the channel, if that is granted."""
        grant, round_idx = request.grant, request.round_idx + 1
        if grant is None or not request.ordered_round < round_idx <= request.grant_until:
            return
        request.ordered_round = round_idx
        shape = grant.shape.within(self.max_context_len - request.seq_len)
        if shape is None:
            self._commit(request, None)
            return
        self.attached.append(
            DraftRound(
                request_id=request.open.request_id,
                target_epoch=request.open.target_epoch,
                draft_epoch=grant.draft_epoch,
                round_idx=round_idx,
                seq_len=request.seq_len,
                token_offset=request.num_tokens_sent,
                token_ids=tuple(request.tokens[request.num_tokens_sent :]),
                shape=shape,
            )
        )
        request.num_tokens_sent = len(request.tokens)

    def _handle(self, message: Any) -> None:
        try:
            match message:
                case TargetOpen():
                    self._open(message)
                case VerifyRound():
                    self._queue_round(message)
                    if message.credit is not None:
                        self._extend_credit(message, message.credit)
                case CreditUpdate():
                    self._extend_credit(message, message.credit)
                case TargetClose():
                    held = self.requests.get(message.request_id)
                    if held is not None and held.open.target_epoch <= message.target_epoch:
                        self._drop(held)
                case FeatureSubscribe():
                    self._subscribe(message)
                case FeatureAck():
                    held = self.requests.get(message.request_id)
                    if held is not None and held.open.target_epoch == message.target_epoch:
                        held.acknowledged = max(held.acknowledged, message.position)
                case FeatureUnsubscribe():
                    self._early.pop(message.request_id, None)
                    held = self.requests.get(message.request_id)
                    if held is not None and held.open.target_epoch == message.target_epoch:
                        held.next_feature = None
                case _:
                    raise TypeError(type(message).__name__)
        except CoppiceError as error:
            failure = failure_of(
                error,
                request_id=message.request_id,
                target_epoch=message.target_epoch,
                draft_epoch=getattr(message, "draft_epoch", 0),
                round_idx=getattr(message, "round_idx", 0),
            )
            is_feature = isinstance(message, FeatureSubscribe)
            self._outbox.append(FeatureFailure(failure=failure) if is_feature else failure)

    def step(self) -> list[Any]:
        queue, self._queue = self._queue, []
        for request in list(self.requests.values()):
            if request.can_run_alone and all(queued is not request for queued, _ in queue):
                self._commit(request, None)
                self._num_rows += 1
        for request, message in queue:
            if self.requests.get(message.request_id) is not request:
                continue
            if isinstance(message, TargetOpen):
                self._prefill(request)
            else:
                self._verify(request, message)
        if queue:
            self._num_steps += 1
            self._num_request_steps += len(queue)
        for request in self.requests.values():
            self._send_features(request)
        outbox, self._outbox = self._outbox, []
        return outbox

    def retract(self, request_id: str) -> None:
        """Drop a request as if pages had run out."""
        request = self.requests[request_id]
        self._drop(request)
        self._outbox.append(
            RequestRetracted(request_id=request_id, target_epoch=request.open.target_epoch)
        )

    def unlink(self, request_id: str) -> None:
        """Lose the channel to a request's draft."""
        request = self.requests[request_id]
        self._outbox.append(
            DraftDetached(
                request_id=request_id,
                target_epoch=request.open.target_epoch,
                draft_epoch=request.draft_epoch,
            )
        )
        request.draft_epoch, request.grant = 0, None

    def _open(self, message: TargetOpen) -> None:
        known = self.requests.get(message.request_id)
        if known is not None:
            if known.open.target_epoch >= message.target_epoch:
                raise StaleStateError("not a newer epoch", field="target_epoch")
            self._drop(known)
        _check_ids(message.token_ids)
        if len(message.token_ids) >= self.max_context_len:
            raise InvalidArgumentError(
                "the prompt fills the context", reason="PROMPT_TOO_LONG", field="token_ids"
            )
        request = _Request(open=message, tokens=list(message.token_ids))
        self.requests[message.request_id] = request
        self._queue.append((request, message))
        early = self._early.pop(message.request_id, None)
        if early is not None:
            self._handle(early)

    def _extend_credit(self, message: VerifyRound | CreditUpdate, credit: Credit) -> None:
        request = self.requests.get(message.request_id)
        if request is None:
            raise NotFoundError("no such request", field="request_id")
        if request.open.target_epoch != message.target_epoch:
            raise StaleStateError("another epoch", field="target_epoch")
        trees = credit.trees
        if isinstance(trees, RootOnly):
            request.granted_until = max(request.granted_until, credit.until_round_idx)
        elif request.draft_epoch == trees.draft_epoch:
            if request.grant is None:
                request.num_tokens_sent = trees.token_offset
            request.grant, request.grant_until = trees, credit.until_round_idx
            self._order_tree(request)

    def _queue_round(self, message: VerifyRound) -> None:
        request = self.requests.get(message.request_id)
        if request is None:
            raise NotFoundError("no such request", field="request_id")
        if request.open.target_epoch != message.target_epoch:
            raise StaleStateError("another epoch", field="target_epoch")
        request.ordered_round = min(request.ordered_round, request.round_idx)
        request.grant = None
        if request.last_reply is not None and request.round_idx == message.round_idx:
            self._outbox.append(request.last_reply)
            return
        if 0 < message.round_idx <= min(request.ordered_round, request.round_idx):
            return  # its answer is on the way
        if message.round_idx != request.round_idx + 1:
            raise StaleStateError("another round", field="round_idx")
        if message.seq_len != request.seq_len:
            raise StaleStateError("another seq_len", field="seq_len")
        if message.root_token_id != request.tokens[-1]:
            raise StaleStateError("another root", field="root_token_id")
        if message.tree is not None:
            check_tree(
                message.tree.token_ids,
                message.tree.parent_index,
                root_token_id=request.tokens[-1],
                vocab_size=VOCAB_SIZE,
            )
        self._queue.append((request, message))

    def _prefill(self, request: _Request) -> None:
        self._outbox.append(
            TargetAdmitted(
                request_id=request.open.request_id,
                target_epoch=request.open.target_epoch,
                times=AnswerTimes(clock_id=clock_id(), begin_ns=time.monotonic_ns()),
            )
        )
        self._num_rows += len(request.tokens)
        request.seq_len = len(request.tokens) - 1
        self._commit(request, None)

    def _verify(self, request: _Request, message: VerifyRound) -> None:
        self._num_rows += len(message.tree.token_ids) if message.tree else 1
        times = None
        if request.open.is_timed:
            times = take(message.received_ns)
            times = times.then("forward", times.end_ns + FORWARD_NS)
        self._commit(request, message.tree, times)

    def _commit(
        self, request: _Request, tree: TokenTree | None, times: AnswerTimes | None = None
    ) -> None:
        """Walk from the root and commit what agrees; a prefill is the root alone."""
        emitted: list[int] = []
        path = [0]
        while True:
            token = next_token([*request.tokens, *emitted], request.open.sampling)
            emitted.append(token)
            child = _child(tree, path[-1], token)
            if child is None:
                break
            path.append(child)
        num_accepted = len(path) - 1
        emitted, reason, stop_id = self._cut(request, emitted)
        request.tokens += emitted
        request.seq_len += len(emitted)
        request.round_idx += 1
        self._num_moved += path != list(range(len(path)))
        logprobs = tuple(TokenLogprob(token_id=token, logprob=-1.0) for token in emitted)
        request.last_reply = AcceptedPath(
            request_id=request.open.request_id,
            target_epoch=request.open.target_epoch,
            round_idx=request.round_idx,
            seq_len=request.seq_len,
            accept_index=tuple(path[: len(emitted)]),
            token_ids=tuple(emitted),
            num_accepted_drafts=num_accepted,
            num_draft_tokens=len(tree.token_ids) if tree is not None else 1,
            logprobs=logprobs if request.open.logprobs else (),
            finish_reason=reason,
            matched_stop_token_id=stop_id,
            times=times,
        )
        self._outbox.append(request.last_reply)
        if reason is not FinishReason.NONE:
            self._drop(request)
        else:
            self._order_tree(request)

    def _cut(
        self, request: _Request, emitted: list[int]
    ) -> tuple[list[int], FinishReason, int | None]:
        stopping = request.open.stopping
        num_before = len(request.tokens) - request.open.num_prompt_tokens
        for index, token in enumerate(emitted):
            count = num_before + index + 1
            if token in stopping.stop_token_ids and count >= stopping.min_new_tokens:
                return emitted[: index + 1], FinishReason.STOP, token
            if count >= stopping.max_new_tokens:
                return emitted[: index + 1], FinishReason.LENGTH, None
            if len(request.tokens) + index + 1 >= self.max_context_len:
                return emitted[: index + 1], FinishReason.CONTEXT_LENGTH, None
        return emitted, FinishReason.NONE, None

    def _subscribe(self, message: FeatureSubscribe) -> None:
        request = self.requests.get(message.request_id)
        if request is None or request.open.target_epoch < message.target_epoch:
            self._early[message.request_id] = message
            return
        if request.open.target_epoch > message.target_epoch:
            raise StaleStateError("that epoch is over", field="target_epoch")
        if not (self.has_features and request.open.wants_features):
            raise InvalidArgumentError("this request keeps no features", field="request_id")
        if message.from_position > len(request.tokens):
            raise InvalidArgumentError("past the end", field="from_position")
        request.next_feature = message.from_position
        request.reads_ring = self.ring is not None and message.ring_nonce == self.ring.nonce
        self._send_features(request)

    def _send_features(self, request: _Request) -> None:
        if request.next_feature is None:
            return
        while request.next_feature < request.seq_len:
            end = min(request.next_feature + self.rows_per_chunk, request.seq_len)
            data = feature_rows(request.tokens, request.next_feature, end, self.width)
            self._outbox.append(
                FeatureChunk(
                    request_id=request.open.request_id,
                    target_epoch=request.open.target_epoch,
                    start=request.next_feature,
                    shape=(end - request.next_feature, self.width),
                    dtype="float32",
                    data=self._to_ring(data) if request.reads_ring else data,
                )
            )
            request.next_feature = end

    def _to_ring(self, data: bytes) -> RingSpan:
        assert self.ring is not None
        self.ring.start_step()
        span = self.ring.write(np.frombuffer(data, np.uint8).reshape(1, -1))
        assert span is not None
        return span

    def _drop(self, request: _Request) -> None:
        del self.requests[request.open.request_id]


def _child(tree: TokenTree | None, parent: int, token: int) -> int | None:
    if tree is None:
        return None
    for node, (token_id, up) in enumerate(zip(tree.token_ids, tree.parent_index, strict=True)):
        if up == parent and token_id == token:
            return node
    return None


def _check_ids(ids: Sequence[int]) -> None:
    if max(ids) >= VOCAB_SIZE:
        raise InvalidArgumentError(f"ids must lie in 0..{VOCAB_SIZE - 1}", field="token_ids")
