"""The requests that a draft's engine holds: opened, ordered, retracted, failed, closed."""

from __future__ import annotations

import logging
from collections.abc import Sequence, ValuesView
from typing import TYPE_CHECKING, Any

from draft_service.features import FeatureStream
from draft_service.request import DeviceTree, DraftRequest
from draft_service.runner import DraftRunner
from shared.errors import CoppiceError, InvalidArgumentError, ResourceExhaustedError
from shared.grammar.grammars import Grammars
from shared.kv.allocator import OutOfPagesError
from shared.logs import log_worker_request
from shared.messages import (
    DraftClose,
    DraftOpen,
    DraftRound,
    PeerDetach,
    RequestRetracted,
)
from shared.peer.channel import PeerChannel
from shared.rpc.status import failure_of
from shared.step.recorder import Recorder

if TYPE_CHECKING:
    from shared.grammar.matcher import OutputMatcher

logger = logging.getLogger(__name__)


class RequestTable:
    """Requests by request_id, oldest first, and the pages that they reserve.

    Args:
        outbox: Takes what goes to the front.
        grammars: Of outputs.
        max_context_len: Longest conversation, tokens.
    """

    def __init__(
        self,
        runner: DraftRunner,
        outbox: list[Any],
        recorder: Recorder,
        grammars: Grammars,
        *,
        max_context_len: int,
    ) -> None:
        self._grammars = grammars
        self._pool = runner.pool
        self._window = runner.window
        self._kv_lag = runner.model.kv_lag
        self._input_shift = runner.model.input_shift
        self._vocab_size = runner.vocab_size
        self._outbox = outbox
        self._recorder = recorder
        self._max_context_len = max_context_len
        self._held: dict[str, DraftRequest] = {}
        self._num_opened = 0
        self.num_retracted = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    def __getitem__(self, request_id: str) -> DraftRequest:
        return self._held[request_id]

    def get(self, request_id: str) -> DraftRequest | None:
        """Return a request, if it is held."""
        return self._held.get(request_id)

    def values(self) -> ValuesView[DraftRequest]:
        """Return the requests, oldest first."""
        return self._held.values()

    @property
    def num_targets(self) -> int:
        """Return how many targets order trees of requests over channels of their own."""
        channels = {request.channel for request in self._held.values()}
        return len(channels - {None})

    def expecting(
        self, request_id: str, target_epoch: int, draft_epoch: int | None = None
    ) -> DraftRequest | None:
        """Return a request, unless a message of these epochs is not about its present state.

        Args:
            draft_epoch: None: the message does not say it.
        """
        request = self._held.get(request_id)
        if request is None or request.open.target_epoch != target_epoch:
            return None
        if draft_epoch is not None and request.open.draft_epoch != draft_epoch:
            return None
        return request

    def open(self, message: DraftOpen) -> DraftRequest | None:
        """Hold a request; None: it is held already, by this message or a newer one.

        Raises: InvalidArgumentError, or ResourceExhaustedError if the page table is full.
        """
        known = self._held.get(message.request_id)
        if known is not None:
            if known.open.draft_epoch >= message.draft_epoch:
                return None  # a late duplicate
            self.drop(known)
        if not message.token_ids:
            raise InvalidArgumentError("token_ids is empty", field="token_ids")
        if len(message.token_ids) > self._max_context_len:
            raise InvalidArgumentError(
                f"{len(message.token_ids)} tokens exceed max_context_len {self._max_context_len}",
                field="token_ids",
            )
        self._check_tokens(message.token_ids)
        if not self._pool.has_free_row:
            raise ResourceExhaustedError("the draft worker holds max_num_requests requests")
        num_rows = max(len(message.token_ids) - self._input_shift, 0)
        base = max(num_rows - self._window, 0) if self._window else 0
        features = None
        if self._input_shift:
            features = FeatureStream(message, self._outbox, self._recorder, start=base)
        request = DraftRequest(
            open=message,
            admission_idx=self._num_opened,
            req_idx=self._pool.acquire(),
            base=base,
            tokens=list(message.token_ids),
            features=features,
            matcher=self._matcher(message),
            matched_len=len(message.token_ids),
        )
        self._num_opened += 1
        self._held[message.request_id] = request
        if message.is_timed:
            self._recorder.watch(message.request_id)
        return request

    def _matcher(self, message: DraftOpen) -> OutputMatcher | None:
        """Return what follows the output in its grammar; None: it has none, or not here."""
        if not (message.compiled_grammar and self._grammars.are_served):
            return None
        try:
            output = message.token_ids[message.num_prompt_tokens :]
            return self._grammars.matcher(message.compiled_grammar, output)
        except InvalidArgumentError as error:  # which the target says to whoever asked
            log_worker_request(
                logger, logging.INFO, message.request_id, "trees are free: %s", error.message
            )
            return None

    def take_order(
        self,
        request: DraftRequest,
        order: DraftRound,
        channel: PeerChannel | None,
        device_tree: DeviceTree | None = None,
    ) -> None:
        """Let a request take new tokens and the order of its next tree.

        Args:
            channel: That the order came over; None: through the front.
        Raises: InvalidArgumentError, or StaleStateError if it does not follow from what is held.
        """
        self._check_tokens(order.token_ids)
        if order.seq_len + 1 > self._max_context_len:
            raise InvalidArgumentError(
                f"seq_len {order.seq_len} exceeds max_context_len", field="seq_len"
            )
        is_new = request.accept_order(order, channel, device_tree)
        if is_new and request.open.is_timed:
            if channel is None:
                self._recorder.take_order(order.request_id, order.round_idx, order.received_ns)
            else:
                self._recorder.begin(order.request_id, order.round_idx)

    def reserve(self, request: DraftRequest, num_slots: int) -> bool:
        """Reserve slots past kv_len, retracting the newest requests while there are too few pages.

        Returns: False if the request itself had to go.
        """
        while True:
            try:
                self._pool.reserve(request.req_idx, request.kv_len + num_slots)
            except OutOfPagesError:
                newest = max(self._held.values(), key=lambda held: held.admission_idx)
                self.drop(newest)
                self.num_retracted += 1
                log_worker_request(
                    logger, logging.INFO, newest.request_id, "made room for an older request"
                )
                self._outbox.append(
                    RequestRetracted(
                        request_id=newest.request_id,
                        target_epoch=newest.open.target_epoch,
                        draft_epoch=newest.open.draft_epoch,
                    )
                )
                if newest is request:
                    return False
            else:
                return True

    def try_reserve(self, request: DraftRequest, num_rows: int, num_slots: int) -> bool:
        """Reserve slots for rows past kv_len and for scratch behind them; retracts no request.

        Returns: False if the rows do not fit into the context, or if no pages are free.
        """
        end = request.kv_len + num_rows
        if end > self._max_context_len:
            return False
        try:
            self._pool.reserve(request.req_idx, end + num_slots)
        except OutOfPagesError:
            return False
        return True

    def drop_unseen(self, request: DraftRequest) -> None:
        """Free the pages that no row to come will see."""
        if self._window:
            first_seen = request.kv_len - self._kv_lag - self._window
            self._pool.drop_before(request.req_idx, first_seen)

    def close(self, message: DraftClose) -> None:
        """Drop a request, unless it was opened anew since."""
        request = self._held.get(message.request_id)
        if request is not None and request.open.draft_epoch <= message.draft_epoch:
            self.drop(request)

    def drop(self, request: DraftRequest) -> None:
        """Free what a request holds, and let its target know."""
        del self._held[request.request_id]
        self._recorder.forget(request.request_id)
        request.is_held = False
        self._pool.release(request.req_idx)
        if request.channel is not None:
            request.channel.put(
                PeerDetach(
                    request_id=request.request_id,
                    target_epoch=request.open.target_epoch,
                    draft_epoch=request.open.draft_epoch,
                )
            )
        if request.features is not None:
            request.features.close()

    def fail(self, message: Any, error: CoppiceError) -> None:
        """Report an error against the request that a message is about, and drop its state."""
        request = self._held.get(message.request_id)
        log_worker_request(logger, logging.INFO, message.request_id, "dropped: %s", error.message)
        if request is not None:
            self.drop(request)
        draft_epoch = request.open.draft_epoch if request else getattr(message, "draft_epoch", 0)
        self._outbox.append(
            failure_of(
                error,
                request_id=message.request_id,
                target_epoch=message.target_epoch,
                draft_epoch=draft_epoch,
                round_idx=getattr(message, "round_idx", 0),
            )
        )

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise InvalidArgumentError(
                f"token ids must lie in 0..{self._vocab_size - 1}", field="token_ids"
            )
