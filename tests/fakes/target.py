"""A target engine without a model: the whole protocol, deterministic tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.errors import CoppiceError, InvalidArgumentError, NotFoundError, StaleStateError
from shared.messages import (
    AcceptedPath,
    AnswerTimes,
    Credit,
    CreditUpdate,
    DraftDetached,
    DraftRest,
    DraftRound,
    FeatureAck,
    FeatureFailure,
    FeatureSpec,
    FeatureSubscribe,
    FeatureUnsubscribe,
    FinishReason,
    PeerAttach,
    PeerDetach,
    PeerTrees,
    RequestFailure,
    RequestRetracted,
    RoundTree,
    RoutedExperts,
    TargetAdmitted,
    TargetClose,
    TargetOpen,
    TokenLogprob,
    TokenTree,
    VerifyRound,
    WorkerInfo,
    WorkerLoad,
)
from shared.rpc.status import failure_of
from shared.times import clock_id, take
from shared.tree import check_tree
from tests.fakes.features import FakeFeatures, HeldRequest
from tests.fakes.model import VOCAB_SIZE, accept, routed_row

FORWARD_NS = 1000  # of a timed round
ASK_ROUNDS = 16  # without a tree before another one is ordered of a draft that is behind


@dataclass(eq=False)
class FakeTarget(FakeFeatures):
    """Verify trees against the hash of the tokens so far; what an output must be is not followed.

    Args:
        peer_socket: Name by which drafts attach to it; "": they cannot.
        logits_hash: What tells it from targets that compute otherwise.
        clock: Says the time, seconds.
        round_s: A round of the root alone by credit begins so long after the round before.
        num_experts: Of a layer; 0: the model has none.
    """

    incarnation: str = "fake-target"
    max_context_len: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    peer_socket: str = ""
    logits_hash: str = "a" * 64
    clock: Callable[[], float] = lambda: 0.0
    round_s: float = 0.0
    num_experts: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._queue: list[tuple[HeldRequest, TargetOpen | VerifyRound]] = []
        self._num_rows = self._num_request_steps = self._num_moved = 0

    @property
    def info(self) -> WorkerInfo:
        spec = FeatureSpec(layer_ids=(0, 1, 2), width=self.width, dtype="float32")
        return self.describe(
            incarnation=self.incarnation,
            model_hash="f" * 64,
            max_context_len=self.max_context_len,
            features=spec if self.has_features else FeatureSpec(),
            kind="target",
            eos_token_ids=self.eos_token_ids,
            feature_ring=self.ring.name if self.ring is not None else "",
            peer_socket=self.peer_socket,
            logits_hash=self.logits_hash,
            has_grammars=True,
            num_experts=self.num_experts,
        )

    @property
    def load(self) -> WorkerLoad:
        return replace(
            super().load,
            num_rows=self._num_rows,
            num_request_steps=self._num_request_steps,
            num_moved_rounds=self._num_moved,
        )

    @property
    def has_work(self) -> bool:
        return bool(self.outbox or self._queue or self._due_alone())

    @property
    def has_work_at(self) -> float | None:
        """Return when the next round by credit may begin; None: none needs no tree."""
        rounds = [r.ready_at for r in self.requests.values() if r.has_root_only_round]
        return min(rounds, default=None)

    def _due_alone(self) -> list[HeldRequest]:
        now = self.clock() + 1e-9
        requests = self.requests.values()
        return [r for r in requests if r.has_root_only_round and r.ready_at <= now]

    def hear(self, message: Any) -> None:
        """Take what a draft says over its peer channel."""
        request = self.held(message)
        if request is None:
            return
        match message:
            case PeerAttach():
                request.draft_epoch, request.is_caught_up = message.draft_epoch, False
                request.num_tokens_sent = message.num_tokens
                self._ask_again(request)
            case PeerDetach() if request.draft_epoch == message.draft_epoch:
                self.lose_channel(message.request_id)
            case TokenTree() if request.is_resting:
                pass
            case TokenTree() if message.draft_epoch == request.draft_epoch:
                request.is_caught_up = True
                if request.peer_trees is None:
                    return
                if message.round_idx == request.round_idx + 1:
                    self._take_tree(request, message)
                else:
                    self._order_tree(request)

    def _take_tree(self, request: HeldRequest, tree: TokenTree) -> None:
        assert request.peer_trees is not None
        try:
            check_tree(
                tree.token_ids,
                tree.parent_index,
                root_token_id=request.tokens[-1],
                vocab_size=VOCAB_SIZE,
                max_num_nodes=request.peer_trees.shape.num_draft_tokens,
            )
            if tree.seq_len != request.seq_len:
                raise InvalidArgumentError("another seq_len", field="seq_len")
        except CoppiceError as error:
            self.outbox.append(failure_of(error, tree))
            return
        times = None
        if request.open.is_timed:
            now = time.monotonic_ns()
            times = AnswerTimes(clock_id=clock_id(), begin_ns=now).including("draft", tree.times)
            times = times.then("forward", times.end_ns + FORWARD_NS)
            times = times.then("commit", times.end_ns)
        self._num_rows += len(tree.token_ids)
        self._commit(request, tree, times)

    def _order_tree(self, request: HeldRequest) -> None:
        """Order the tree of the next round over the peer channel, if there is credit for it."""
        trees, round_idx = request.peer_trees, request.round_idx + 1
        if trees is None or request.round_idx < 0 or request.is_resting:
            return
        if not request.ordered_round < round_idx <= request.credit_until:
            return
        asked = request.asked_round
        if not request.is_caught_up and asked is not None and round_idx < asked + ASK_ROUNDS:
            return
        shape = trees.shape.within(self.max_context_len - request.seq_len)
        if shape is None:
            if request.is_caught_up:
                self._commit(request, None)
            return
        request.ordered_round = request.asked_round = round_idx
        self.to_peer.append(
            DraftRound(
                request_id=request.open.request_id,
                target_epoch=request.open.target_epoch,
                draft_epoch=trees.draft_epoch,
                round_idx=round_idx,
                seq_len=request.seq_len,
                token_offset=request.num_tokens_sent,
                token_ids=tuple(request.tokens[request.num_tokens_sent :]),
                shape=shape,
            )
        )
        request.num_tokens_sent = len(request.tokens)

    def take(self, message: Any) -> None:
        match message:
            case TargetOpen():
                self._open(message)
            case VerifyRound():
                self._queue_round(message)
            case CreditUpdate():
                self._extend_credit(self._request_of(message), message.credit)
            case TargetClose():
                held = self.requests.get(message.request_id)
                if held is not None and held.open.target_epoch <= message.target_epoch:
                    self._drop(held)
            case FeatureSubscribe():
                self.subscribe(message)
            case FeatureAck() | FeatureUnsubscribe():
                self.follow_reader(message)
            case _:
                raise TypeError(type(message).__name__)

    def fail(self, message: Any, failure: RequestFailure) -> None:
        is_feature = isinstance(message, FeatureSubscribe)
        self.outbox.append(FeatureFailure(failure=failure) if is_feature else failure)

    def step(self) -> list[Any]:
        queue, self._queue = self._queue, []
        for request in self._due_alone():
            if all(queued is not request for queued, _ in queue):
                self._commit(request, None, self._times_alone(request))
                self._num_rows += 1
        for request, message in queue:
            if self.requests.get(message.request_id) is not request:
                continue
            if isinstance(message, TargetOpen):
                self._prefill(request)
            else:
                self._verify(request, message)
        if queue:
            self.num_steps += 1
            self._num_request_steps += len(queue)
        for request in self.requests.values():
            self.send_features(request)
        return self.take_outbox()

    def retract(self, request_id: str) -> None:
        """Drop a request as if pages had run out."""
        request = self.requests[request_id]
        self._drop(request)
        self.outbox.append(
            RequestRetracted(request_id=request_id, target_epoch=request.open.target_epoch)
        )

    def lose_channel(self, request_id: str) -> None:
        """Lose the channel to a request's draft."""
        request = self.requests[request_id]
        self.outbox.append(
            DraftDetached(
                request_id=request_id,
                target_epoch=request.open.target_epoch,
                draft_epoch=request.draft_epoch,
            )
        )
        request.draft_epoch = 0

    def rest(self, request_id: str, *, is_resting: bool) -> None:
        """Want no trees of a request for a while, or want them again."""
        request = self.requests[request_id]
        request.is_resting, request.is_caught_up = is_resting, False
        self.outbox.append(
            DraftRest(
                request_id=request_id,
                target_epoch=request.open.target_epoch,
                draft_epoch=request.draft_epoch,
                is_resting=is_resting,
            )
        )
        if not is_resting:
            self._ask_again(request)

    def _open(self, message: TargetOpen) -> None:
        known = self.requests.get(message.request_id)
        if known is not None and known.open.target_epoch >= message.target_epoch:
            raise StaleStateError("not a newer epoch", field="target_epoch")
        _check_ids(message.token_ids)
        if len(message.token_ids) >= self.max_context_len:
            raise InvalidArgumentError(
                "the prompt fills the context", reason="PROMPT_TOO_LONG", field="token_ids"
            )
        if known is not None:
            self._drop(known)
        request = HeldRequest(open=message, tokens=list(message.token_ids))
        self.requests[message.request_id] = request
        if message.credit is not None:
            self._extend_credit(request, message.credit)
        self._queue.append((request, message))
        self.subscribe_early(message.request_id)

    def _request_of(self, message: VerifyRound | CreditUpdate) -> HeldRequest:
        request = self.requests.get(message.request_id)
        if request is None:
            raise NotFoundError("no such request", field="request_id")
        if request.open.target_epoch != message.target_epoch:
            raise StaleStateError("another epoch", field="target_epoch")
        return request

    def _extend_credit(self, request: HeldRequest, credit: Credit) -> None:
        request.credit_until = max(request.credit_until, credit.until_round_idx)
        request.trees = credit.trees if isinstance(credit.trees, PeerTrees) else None
        self._ask_again(request)

    def _ask_again(self, request: HeldRequest) -> None:
        """Order the next tree; also of a draft that is behind and was asked before."""
        request.asked_round = None
        self._order_tree(request)

    def _queue_round(self, message: VerifyRound) -> None:
        request = self._request_of(message)
        if request.ordered_round > request.round_idx:
            request.ordered_round, request.is_caught_up = request.round_idx, False
        request.credit_until = min(request.credit_until, request.round_idx)
        request.last_credited_round = max(request.last_credited_round, request.credit_until)
        request.trees = None
        self._check_round(request, message)

    def _check_round(self, request: HeldRequest, message: VerifyRound) -> None:
        """Queue the round if it is the next one; answer again if it was the last one."""
        if request.last_reply is not None and request.round_idx == message.round_idx:
            self.outbox.append(request.last_reply)
            return
        if 0 < message.round_idx <= request.last_credited_round:
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

    def _prefill(self, request: HeldRequest) -> None:
        self.outbox.append(
            TargetAdmitted(
                request_id=request.open.request_id,
                target_epoch=request.open.target_epoch,
                times=AnswerTimes(clock_id=clock_id(), begin_ns=time.monotonic_ns()),
            )
        )
        self._num_rows += len(request.tokens)
        request.seq_len = len(request.tokens) - 1
        self._commit(request, None)

    def _times_alone(self, request: HeldRequest) -> AnswerTimes | None:
        """Return the times of a round of the root alone by credit."""
        if not request.open.is_timed:
            return None
        times = AnswerTimes(clock_id=clock_id(), begin_ns=time.monotonic_ns())
        return times.then("forward", times.end_ns + FORWARD_NS)

    def _verify(self, request: HeldRequest, message: VerifyRound) -> None:
        self._num_rows += len(message.tree.token_ids) if message.tree else 1
        times = None
        if request.open.is_timed:
            times = take(message.received_ns)
            times = times.then("forward", times.end_ns + FORWARD_NS)
        self._commit(request, message.tree, times)

    def _commit(
        self, request: HeldRequest, tree: TokenTree | None, times: AnswerTimes | None = None
    ) -> None:
        """Commit what agrees with the tree; a prefill is the root alone."""
        path, emitted = accept(request.tokens, tree, request.open.sampling)
        num_accepted = len(path) - 1
        emitted, reason, stop_id = self._cut(request, emitted)
        shown = None
        if request.open.wants_trees:
            shown = RoundTree(
                token_ids=tree.token_ids if tree is not None else (request.tokens[-1],),
                parent_index=tree.parent_index if tree is not None else (-1,),
                accept_index=tuple(path[: len(emitted)]),
                bonus_token_id=emitted[-1],
            )
        first = len(request.tokens)
        request.tokens += emitted
        request.seq_len += len(emitted)
        request.round_idx += 1
        request.ready_at = self.clock() + self.round_s
        self._num_moved += path != list(range(len(path)))
        top = tuple((token, -1.0) for token in range(request.open.top_logprobs))
        logprobs = tuple(TokenLogprob(token_id=token, logprob=-1.0, top=top) for token in emitted)
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
            tree=shown,
            routed_experts=self._routed(request, first, len(emitted)),
        )
        self.outbox.append(request.last_reply)
        if reason is not FinishReason.NONE:
            self._drop(request)
        else:
            self._order_tree(request)

    def _routed(self, request: HeldRequest, first: int, count: int) -> RoutedExperts | None:
        """Return the experts of the rows that tokens [first, first + count) were sampled from."""
        if not request.open.wants_routed_experts:
            return None
        lengths = range(first, first + count)
        rows = [routed_row(request.tokens[:length], self.num_experts) for length in lengths]
        return RoutedExperts(
            ids=b"".join(rows), num_layers=2, top_k=2, num_experts=self.num_experts
        )

    def _cut(
        self, request: HeldRequest, emitted: list[int]
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

    def _drop(self, request: HeldRequest) -> None:
        del self.requests[request.open.request_id]


def _check_ids(ids: Sequence[int]) -> None:
    if max(ids) >= VOCAB_SIZE:
        raise InvalidArgumentError(f"ids must lie in 0..{VOCAB_SIZE - 1}", field="token_ids")
