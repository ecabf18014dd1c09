"""A draft engine without a model: it knows the target's hash and guesses wrong now and then."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from shared.errors import InvalidArgumentError
from shared.messages import (
    DraftClose,
    DraftOpen,
    DraftRound,
    FeatureAck,
    FeatureChunk,
    FeatureCommand,
    FeatureSpec,
    FeatureSubscribe,
    FeatureUnsubscribe,
    PeerAttach,
    PeerDetach,
    RequestFailure,
    RequestRetracted,
    TokenTree,
    WorkerInfo,
)
from shared.times import take
from tests.fakes.engine import FakeEngine
from tests.fakes.model import VOCAB_SIZE, WIDTH, feature_rows, next_token


@dataclass(eq=False)
class _Request:
    open: DraftOpen
    tokens: list[int]
    features_end: int = 0
    num_rows_checked: int = 0
    unchecked_rows: bytearray = field(default_factory=bytearray)  # up to features_end
    pending: DraftRound | None = None
    is_peer_order: bool = False  # the pending order came over the peer channel


@dataclass(eq=False)
class FakeDraft(FakeEngine[_Request]):
    """Grow a comb: one path of guesses, a wrong sibling BEFORE each of them, so that KV must move.

    Args:
        wrong_every: Every so many-th guess (by a hash) is wrong; 0 = never.
        needs_features: Wait for the target's rows, and check every value of them.
    """

    incarnation: str = "fake-draft"
    wrong_every: int = 5
    needs_features: bool = True
    width: int = WIDTH
    max_context_len: int = 4096

    @property
    def info(self) -> WorkerInfo:
        spec = FeatureSpec(layer_ids=(0, 1, 2), width=self.width)
        return self.describe(
            incarnation=self.incarnation,
            model_hash="e" * 64,
            max_context_len=self.max_context_len,
            features=spec if self.needs_features else FeatureSpec(),
            kind="eagle3" if self.needs_features else "standalone",
        )

    @property
    def has_work(self) -> bool:
        return bool(self.outbox) or any(self._can_grow(r) for r in self.requests.values())

    def take(self, message: Any) -> None:
        match message:
            case DraftOpen():
                self._open(message)
            case DraftRound():
                self._order(message, is_peer_order=False)
            case DraftClose():
                held = self.requests.get(message.request_id)
                if held is not None and held.open.draft_epoch <= message.draft_epoch:
                    self._drop(held)
            case FeatureChunk():
                self._take_rows(message)
            case RequestFailure():
                held = self.held(message)
                if held is not None:
                    self._drop(held)
                    self.outbox.append(replace(message, draft_epoch=held.open.draft_epoch))
            case _:
                raise TypeError(type(message).__name__)

    def hear(self, message: DraftRound) -> None:
        """Take what a target orders over the peer channel."""
        request = self.requests.get(message.request_id)
        if request is not None and request.open.target_socket:
            self._order(replace(message, received_ns=time.monotonic_ns()), is_peer_order=True)

    def step(self) -> list[Any]:
        for request in self.requests.values():
            if self._can_grow(request):
                tree = self._grow(request)
                if request.is_peer_order:
                    self.to_peer.append(tree)
                else:
                    self.outbox.append(tree)
                request.pending = None
                self.num_steps += 1
        return self.take_outbox()

    def retract(self, request_id: str) -> None:
        """Drop a request as if pages had run out."""
        request = self.requests[request_id]
        self._drop(request)
        self.outbox.append(
            RequestRetracted(
                request_id=request_id,
                target_epoch=request.open.target_epoch,
                draft_epoch=request.open.draft_epoch,
            )
        )

    def lose_channel(self, request_id: str) -> None:
        """Lose the channel to a request's target."""
        request = self.requests[request_id]
        request.open = replace(request.open, target_socket="")
        request.is_peer_order = False

    def _open(self, message: DraftOpen) -> None:
        known = self.requests.get(message.request_id)
        if known is not None:
            self._drop(known)
        if max(message.token_ids) >= VOCAB_SIZE:
            raise InvalidArgumentError("ids out of the vocabulary", field="token_ids")
        request = _Request(open=message, tokens=list(message.token_ids))
        self.requests[message.request_id] = request
        if message.target_socket:
            self.to_peer.append(
                PeerAttach(
                    request_id=message.request_id,
                    target_epoch=message.target_epoch,
                    draft_epoch=message.draft_epoch,
                    num_tokens=len(message.token_ids),
                )
            )
        if self.needs_features:
            self._subscribe(request)

    def _order(self, message: DraftRound, *, is_peer_order: bool) -> None:
        request = self.requests.get(message.request_id)
        if request is None or request.open.draft_epoch != message.draft_epoch:
            return
        if message.unless_attached and request.open.target_socket:
            return
        if message.seq_len + 1 < len(request.tokens):
            return  # it came late
        if message.token_offset > len(request.tokens):
            raise InvalidArgumentError("tokens are missing", field="token_offset")
        request.tokens[message.token_offset :] = message.token_ids
        assert len(request.tokens) == message.seq_len + 1
        self._check_rows(request)
        request.pending, request.is_peer_order = message, is_peer_order

    def _take_rows(self, chunk: FeatureChunk) -> None:
        request = self.held(chunk)
        if request is None:
            return
        assert chunk.start == request.features_end, "no row is sent twice, and none is left out"
        end = chunk.start + chunk.shape[0]
        request.unchecked_rows += chunk.data
        request.features_end = end
        self._check_rows(request)
        self._ask_features(
            request,
            FeatureAck(request_id=chunk.request_id, target_epoch=chunk.target_epoch, position=end),
        )

    def _check_rows(self, request: _Request) -> None:
        """Compare rows with what their tokens give; rows may be here before their tokens."""
        begin, end = request.num_rows_checked, min(request.features_end, len(request.tokens))
        if begin < end:
            rows = feature_rows(request.tokens, begin, end, self.width)
            assert request.unchecked_rows[: len(rows)] == rows, "wrong feature values"
            del request.unchecked_rows[: len(rows)]
            request.num_rows_checked = end

    def _can_grow(self, request: _Request) -> bool:
        if request.pending is None:
            return False
        return not self.needs_features or request.features_end >= request.pending.seq_len

    def _grow(self, request: _Request) -> TokenTree:
        order = request.pending
        assert order is not None
        tokens, parents, scores = [request.tokens[-1]], [-1], [0.0]
        seen = list(request.tokens)
        parent = 0
        for depth in range(1, order.shape.num_steps + 1):
            guess = next_token(seen, request.open.sampling)
            is_wrong = self.wrong_every and (guess + len(seen)) % self.wrong_every == 0
            token = (guess + 1) % VOCAB_SIZE if is_wrong else guess
            nodes = [token] if order.shape.topk == 1 else [(token + 2) % VOCAB_SIZE, token]
            if len(tokens) + len(nodes) > order.shape.num_draft_tokens:
                break
            for node in nodes:
                tokens.append(node)
                parents.append(parent)
                scores.append(-float(depth))
            parent = len(tokens) - 1
            seen.append(token)
        return TokenTree(
            request_id=order.request_id,
            target_epoch=order.target_epoch,
            draft_epoch=order.draft_epoch,
            round_idx=order.round_idx,
            seq_len=order.seq_len,
            token_ids=tuple(tokens),
            parent_index=tuple(parents),
            cumulative_logprobs=tuple(scores),
            times=take(order.received_ns) if request.open.is_timed else None,
        )

    def _drop(self, request: _Request) -> None:
        del self.requests[request.open.request_id]
        if request.open.target_socket:
            self.to_peer.append(
                PeerDetach(
                    request_id=request.open.request_id,
                    target_epoch=request.open.target_epoch,
                    draft_epoch=request.open.draft_epoch,
                )
            )
        if self.needs_features:
            self._ask_features(
                request,
                FeatureUnsubscribe(
                    request_id=request.open.request_id, target_epoch=request.open.target_epoch
                ),
            )

    def _subscribe(self, request: _Request) -> None:
        self._ask_features(
            request,
            FeatureSubscribe(
                request_id=request.open.request_id,
                target_epoch=request.open.target_epoch,
                from_position=request.features_end,
                draft_epoch=request.open.draft_epoch,
            ),
        )

    def _ask_features(
        self, request: _Request, command: FeatureSubscribe | FeatureAck | FeatureUnsubscribe
    ) -> None:
        self.outbox.append(
            FeatureCommand(target_address=request.open.target_address, command=command)
        )
