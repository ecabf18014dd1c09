"""The requests of an engine: opened, found, given rounds and credit, closed; with all checks."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from shared.errors import (
    InvalidArgumentError,
    NonFiniteError,
    NotFoundError,
    StaleStateError,
)
from shared.grammar.grammars import Grammars
from shared.logs import log_worker_request
from shared.messages import (
    AnswerTimes,
    Credit,
    CreditUpdate,
    FeatureSubscribe,
    PeerTrees,
    RequestRetracted,
    TargetAdmitted,
    TargetClose,
    TargetOpen,
    VerifyRound,
)
from shared.rpc.status import failure_of
from shared.times import clock_id
from shared.tree import check_tree
from target_service.batch import StepBatch
from target_service.engine_state import EngineState
from target_service.request import ROOT_ONLY, Phase, TargetRequest
from target_service.scheduler import Scheduler, StepPlan
from target_service.tree_source import TreeSource

logger = logging.getLogger(__name__)


class RequestTable:
    """What the orchestrator's messages, and steps, do to requests.

    Args:
        source: Brings the trees of rounds that need no order.
        grammars: Of outputs.
    """

    def __init__(
        self, state: EngineState, scheduler: Scheduler, source: TreeSource, grammars: Grammars
    ) -> None:
        self._grammars = grammars
        self._state = state
        self._requests = state.requests
        self._scheduler = scheduler
        self._source = source

    def open(self, message: TargetOpen) -> FeatureSubscribe | None:
        """Let a request wait for pages; an older epoch of it ends.

        Returns: The subscription to its features that came before it.
        Raises: InvalidArgumentError or StaleStateError.
        """
        known = self._requests.get(message.request_id)
        if known is not None and known.target_epoch >= message.target_epoch:
            raise StaleStateError(
                f"target_epoch {message.target_epoch} is not newer than the open one",
                field="target_epoch",
            )
        self._check_open(message)
        matcher = None
        if message.compiled_grammar:
            output = message.token_ids[message.num_prompt_tokens :]
            matcher = self._grammars.matcher(message.compiled_grammar, output)
        if known is not None:
            self.drop(known)
        max_context_len = self._state.info.max_context_len
        request = TargetRequest(
            open=message,
            admission_idx=next(self._state.turns),
            opened_s=time.monotonic(),
            tokens=list(message.token_ids),
            stop_ids=frozenset(message.stopping.stop_token_ids),
            token_limit=min(
                message.num_prompt_tokens + message.stopping.max_new_tokens, max_context_len
            ),
            matcher=matcher,
        )
        self._requests[message.request_id] = request
        if message.is_timed:
            self._state.recorder.watch(message.request_id)
        self._scheduler.enqueue(request)
        if message.credit is not None:
            self._give(request, message.credit)
        return self._state.features.start(request)

    def find(self, request_id: str, target_epoch: int) -> TargetRequest:
        """Return a request. Raises: NotFoundError, or StaleStateError of another epoch."""
        request = self._requests.get(request_id)
        if request is None:
            raise NotFoundError(f"no request {request_id!r} here", field="request_id")
        if request.target_epoch != target_epoch:
            raise StaleStateError(
                f"target_epoch is {target_epoch}, expected {request.target_epoch}",
                field="target_epoch",
            )
        return request

    def order_round(self, message: VerifyRound) -> None:
        """Queue a round, which ends a credit; a round that is answered is repeated.

        Raises: NotFoundError, StaleStateError or InvalidTreeError.
        """
        request = self.find(message.request_id, message.target_epoch)
        self._source.end_credit(request)
        request.end_credit()
        if request.last_reply is not None and message.round_idx == request.round_idx:
            self._state.outbox.append(request.last_reply)
        elif not _is_under_way(request, message.round_idx):
            self._check_round(request, message)
            request.queued = (
                ROOT_ONLY if message.tree is None else request.host_tree(message.tree, "relayed")
            )
            request.queue_idx = next(self._state.turns)
            self._state.recorder.take_order(
                request.request_id, message.round_idx, message.received_ns
            )

    def extend_credit(self, message: CreditUpdate) -> None:
        """Let a request go on without orders. Raises: NotFoundError or StaleStateError."""
        self._give(self.find(message.request_id, message.target_epoch), message.credit)

    def close(self, message: TargetClose) -> None:
        """Free whatever a request holds, unless a newer epoch has been opened."""
        request = self._requests.get(message.request_id)
        if request is not None and request.target_epoch <= message.target_epoch:
            self.drop(request)

    def drop(self, request: TargetRequest) -> None:
        """Free whatever a request holds; what is in flight of it goes nowhere."""
        self._scheduler.remove(request)
        self._forget(request)

    # --- steps -----------------------------------------------------------------------------------

    def answer_plan(self, plan: StepPlan) -> None:
        """Answer admissions, and requests that had to make room: the scheduler has freed them."""
        self._state.counts.retractions += len(plan.retracted)
        for request in plan.retracted:
            log_worker_request(
                logger, logging.INFO, request.request_id, "made room for an older request"
            )
            self._forget(request)
            self._state.outbox.append(
                RequestRetracted(request_id=request.request_id, target_epoch=request.target_epoch)
            )
        for request in plan.admitted:
            self._state.outbox.append(
                TargetAdmitted(
                    request_id=request.request_id,
                    target_epoch=request.target_epoch,
                    times=AnswerTimes(clock_id=clock_id(), begin_ns=time.monotonic_ns()),
                )
            )

    def fail_numerically(self, request: TargetRequest) -> None:
        """End a request whose logits are no numbers: whatever token were chosen would be wrong."""
        error = NonFiniteError(
            f"a logit of the token after {len(request.tokens)} tokens is NaN or infinite; the "
            "weights overflow in this dtype for this prompt. Try --dtype float32 or bfloat16"
        )
        log_worker_request(logger, logging.ERROR, request.request_id, error.message)
        failure = failure_of(error, request.open, round_idx=request.round_idx + 1)
        self._state.outbox.append(failure)
        self.drop(request)

    def fail_grammar(self, request: TargetRequest) -> None:
        """End a request whose output can go on with no token that its grammar allows."""
        error = InvalidArgumentError(
            f"structured_output cannot be followed: after {request.num_output_tokens} tokens of "
            "output no token of this model is allowed, or it takes too long to find one",
            reason="INVALID_GRAMMAR",
            field="structured_output",
        )
        log_worker_request(logger, logging.WARNING, request.request_id, error.message)
        failure = failure_of(error, request.open, round_idx=request.round_idx)
        self._state.outbox.append(failure)
        self.drop(request)

    def note_launch(self, plan: StepPlan, batch: StepBatch) -> None:
        """Take note of what is in flight."""
        for work in plan.prefills:
            work.request.launched_len = work.stop
        for replay in plan.replays:
            assert replay.request.features is not None
            replay.request.features.is_replaying = True
        requests = batch.trees.requests if batch.trees is not None else ()
        self._source.launched(requests)
        self._state.counts.note_launch(
            plan.verifies,
            num_rows=batch.num_rows,
            num_requests=len(plan.verifies) + len(plan.prefills) + len(plan.replays),
        )
        for request in requests:
            request.note_launch(next(self._state.turns))

    def _give(self, request: TargetRequest, credit: Credit) -> None:
        request.credit_until = max(request.credit_until, credit.until_round_idx)
        request.peer_trees = credit.trees if isinstance(credit.trees, PeerTrees) else None
        request.queue_idx = next(self._state.turns)
        self._source.take_credit(request)

    def _forget(self, request: TargetRequest) -> None:
        self._source.end_credit(request)
        self._state.recorder.forget(request.request_id)
        request.features = None  # who still knows the request must not keep its rows
        del self._requests[request.request_id]

    # --- checks ----------------------------------------------------------------------------------

    def _check_open(self, message: TargetOpen) -> None:
        num_tokens = len(message.token_ids)
        if not 1 <= message.num_prompt_tokens <= num_tokens:
            raise InvalidArgumentError(
                f"num_prompt_tokens is {message.num_prompt_tokens}, expected 1..{num_tokens}",
                field="num_prompt_tokens",
            )
        self._check_ids(message.token_ids, "token_ids")
        max_context_len = self._state.info.max_context_len
        if num_tokens >= max_context_len:
            raise InvalidArgumentError(
                f"{num_tokens} tokens leave no room in a context of {max_context_len}",
                reason="PROMPT_TOO_LONG",
                field="token_ids",
            )
        self._check_ids(message.stopping.stop_token_ids, "stopping.stop_token_ids")
        bias_ids = [token_id for token_id, _ in message.sampling.logit_bias]
        self._check_ids(bias_ids, "sampling.logit_bias")
        if message.wants_routed_experts and not self._state.info.num_experts:
            raise InvalidArgumentError(
                "this model has no experts that rows could be routed to",
                reason="NO_EXPERTS",
                field="wants_routed_experts",
            )

    def _check_ids(self, token_ids: Sequence[int], field: str) -> None:
        vocab_size = self._state.info.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise InvalidArgumentError(f"{field} must lie in 0..{vocab_size - 1}", field=field)

    def _check_round(self, request: TargetRequest, message: VerifyRound) -> None:
        if request.phase is not Phase.RUNNING or message.round_idx != request.round_idx + 1:
            raise StaleStateError(
                f"round {message.round_idx} cannot follow round {request.round_idx}",
                field="round_idx",
            )
        if message.seq_len != request.committed_len:
            raise StaleStateError(
                f"seq_len is {message.seq_len}, expected {request.committed_len}", field="seq_len"
            )
        root_token_id = request.tokens[-1]
        if message.root_token_id != root_token_id:
            raise StaleStateError(
                f"root_token_id is {message.root_token_id}, the bonus token is {root_token_id}",
                field="root_token_id",
            )
        if message.tree is not None:
            check_tree(
                message.tree.token_ids,
                message.tree.parent_index,
                root_token_id=root_token_id,
                vocab_size=self._state.info.vocab_size,
            )


def _is_under_way(request: TargetRequest, round_idx: int) -> bool:
    """Return whether the answer of a round is on its way, so that an order for it came too late."""
    if request.round_idx < round_idx <= request.round_idx + request.num_in_flight:
        return True
    has_begun = round_idx <= request.round_idx or request.queued is not None
    return 0 < round_idx <= request.last_credited_round and has_begun
