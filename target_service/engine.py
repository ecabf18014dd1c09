"""The target engine: takes messages, steps, and says what it did. Single-threaded."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

from shared.errors import CoppiceError
from shared.grammar.grammars import Grammars
from shared.kernels.dispatch import launch_counts
from shared.logs import log_worker_request
from shared.messages import (
    CreditUpdate,
    DraftDetached,
    FeatureAck,
    FeatureFailure,
    FeatureSubscribe,
    FeatureUnsubscribe,
    PeerAttach,
    PeerDetach,
    RowsOffer,
    TargetClose,
    TargetOpen,
    TreeBatch,
    VerifyRound,
    WorkerInfo,
    WorkerLoad,
)
from shared.metrics.samples import Samples, counted
from shared.peer.channel import PeerChannel, PeerChannels, PeerLost
from shared.rpc.protocol import check_protocol
from shared.rpc.status import failure_of
from shared.step.serving_counts import ServingCounts
from target_service.engine_state import EngineState
from target_service.launch_time import LaunchTime
from target_service.pipeline import Pipeline
from target_service.prompt_budget import PromptBudget
from target_service.request import TargetRequest
from target_service.request_table import RequestTable
from target_service.round_times import RoundTimes
from target_service.runner import TargetRunner
from target_service.scheduler import Scheduler
from target_service.step_costs import StepCosts
from target_service.tree_source import TreeSource

logger = logging.getLogger(__name__)


class TargetEngine:
    """Dispatch to the request table, the feature outlet and the tree source; the step is Pipeline.

    Args:
        state: Without requests.
        source: Where the trees of rounds come from.
        channels: To attached drafts.
        grammars: Of outputs.
        overlaps_steps: Launch a step before the result of the one before is read.
        costs: Of a forward, by its rows; None: not known, and no step is launched by them.
        prompt_budget: As of Scheduler.
    """

    def __init__(
        self,
        runner: TargetRunner,
        state: EngineState,
        source: TreeSource,
        channels: PeerChannels,
        grammars: Grammars,
        *,
        max_batch_rows: int,
        prefill_chunk_len: int,
        overlaps_steps: bool,
        costs: StepCosts | None,
        prompt_budget: PromptBudget | None,
    ) -> None:
        self.channels = channels
        self.source = source
        self.features = state.features
        self.scheduler = Scheduler(
            runner.pool,
            max_batch_rows=max_batch_rows,
            prefill_chunk_len=prefill_chunk_len,
            overlaps_steps=overlaps_steps,
            prompt_budget=prompt_budget,
            window=runner.window,
        )
        self._state = state
        self.runner = runner
        self.serving = ServingCounts(runner.graphs)
        self._grammars = grammars
        self._table = RequestTable(state, self.scheduler, source, grammars)
        self.pipeline = Pipeline(
            state=state,
            runner=runner,
            scheduler=self.scheduler,
            source=source,
            table=self._table,
            times=RoundTimes(state.recorder),
            hear_peers=self._hear_peers,
            flush_peers=channels.flush,
            launch_time=LaunchTime(costs),
        )
        self._has_rows: bool | None = None  # None: not known
        self._num_tree_rows: int | None = None

    @property
    def info(self) -> WorkerInfo:
        """Return identity and limits."""
        return self._state.info

    @property
    def requests(self) -> dict[str, TargetRequest]:
        """Return the requests that are open, by request_id."""
        return self._state.requests

    @property
    def has_work(self) -> bool:
        """Return whether a step would do anything."""
        if self._state.outbox:
            return True
        if self.pipeline.in_flight:
            return not self._launch_wait_s
        if self._has_rows is None:
            scheduler = self.scheduler
            self._has_rows = scheduler.has_work or self.source.has_device_trees(scheduler)
        return self._has_rows and not self._window_wait_s

    @property
    def has_work_in_s(self) -> float | None:
        """Return how long work that is here waits at most; None = none waits.

        Trees wait for others, and a launch for the end of the step in flight to be near.
        """
        return self._launch_wait_s or self._window_wait_s or None

    @property
    def _launch_wait_s(self) -> float:
        """Return how long the next launch waits: the step in flight goes on; 0 = not at all."""
        step = self.pipeline.in_flight
        return 0.0 if step is None or step.read.is_done else self.pipeline.launch_time.delay_s

    @property
    def _window_wait_s(self) -> float:
        """Return how long to wait for trees that are being grown; with other work, not at all."""
        if not self.source.window.is_growing or self.source.has_device_trees(self.scheduler):
            return 0.0
        if self._num_tree_rows is None:
            self._num_tree_rows = self.scheduler.num_tree_rows
        return self.source.window.wait_s(self._num_tree_rows) if self._num_tree_rows else 0.0

    def _forget_rows(self) -> None:
        """Look anew at what could be computed: something has changed."""
        self._has_rows = self._num_tree_rows = None

    @property
    def load(self) -> WorkerLoad:
        """Return progress and room."""
        pool, counts = self.runner.pool, self._state.counts
        return WorkerLoad(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_free_pages=pool.num_free_pages,
            num_pages=pool.num_pages,
            num_steps=counts.steps,
            num_rows=counts.rows,
            num_request_steps=counts.request_steps,
            kernel_launches=tuple(sorted(launch_counts().items())),
            num_moved_rounds=counts.moved_rounds,
            num_compiles=self.serving.num_compiles,
            num_captures=self.serving.num_captures,
            num_eager_launches=self.serving.num_eager_launches,
        )

    @property
    def counts(self) -> Samples:
        """Return what was counted since the start, by name."""
        counts, features = self._state.counts, self.features
        mailbox_bytes = counts.mailbox_rows * features.row_bytes
        carried = {**features.num_bytes, "mailbox": mailbox_bytes}
        return {
            **counts.samples,
            **dict(counted("coppice_feature_bytes_total", "carrier", carried)),
        }

    def check_integrity(self) -> None:
        """Raise unless every page is accounted for."""
        self.runner.pool.check_integrity()

    # --- messages --------------------------------------------------------------------------------

    def prepare(self, message: Any) -> Future[Any] | None:
        """Begin to read the grammar of a request that is to be opened."""
        if not isinstance(message, TargetOpen):
            return None
        return self._grammars.begin(message.compiled_grammar)

    def submit(self, message: Any) -> None:
        """Take a message of the front; a bad one is answered and changes nothing."""
        self._forget_rows()
        table, features = self._table, self.features
        try:
            match message:
                case TargetOpen():
                    subscription = table.open(message)
                    if subscription is not None:
                        self.submit(subscription)
                case VerifyRound():
                    table.order_round(message)
                case CreditUpdate():
                    table.extend_credit(message)
                case TargetClose():
                    table.close(message)
                case FeatureSubscribe():
                    features.subscribe(message, None)
                case FeatureAck():
                    features.acknowledge(message, None)
                case FeatureUnsubscribe():
                    features.unsubscribe(message)
                case _:
                    raise TypeError(f"a target engine takes no {type(message).__name__}")
        except CoppiceError as error:
            failure = failure_of(error, message)
            is_feature = isinstance(message, FeatureSubscribe)
            self._state.outbox.append(FeatureFailure(failure=failure) if is_feature else failure)

    def submit_peer(self, channel: PeerChannel, message: Any) -> None:
        """Take a message of a draft's engine; a wrong tree is reported to the orchestrator."""
        self._forget_rows()
        try:
            match message:
                case TreeBatch():
                    for tree, error in self.source.take(channel, message):
                        self._state.outbox.append(failure_of(error, tree))
                case FeatureSubscribe():
                    self.features.subscribe(message, channel)
                case FeatureAck():
                    self.features.acknowledge(message, channel)
                case RowsOffer():
                    self.source.take_offer(channel, message)
                case PeerAttach():
                    check_protocol(message.protocol_version, who="the draft")
                    self.source.attach(message, channel)
                case PeerDetach():
                    self._detach(channel, message)
                case PeerLost():
                    for request in self.requests.values():
                        self._lose_draft(request, channel)
                    self.source.lose(channel)
                case _:
                    raise TypeError(f"a target engine takes no {type(message).__name__} of a peer")
        except CoppiceError as error:
            failure = failure_of(error, message)
            if isinstance(message, FeatureSubscribe | PeerAttach):
                channel.put(failure)
            else:
                self._state.outbox.append(failure)

    def _detach(self, channel: PeerChannel, message: PeerDetach) -> None:
        request = self.requests.get(message.request_id)
        if request is None or request.draft is None:
            return
        if request.draft.draft_epoch == message.draft_epoch:
            self._lose_draft(request, channel)

    def _lose_draft(self, request: TargetRequest, channel: PeerChannel) -> None:
        """Forget a request's draft, if that is attached over this channel; its credit stays."""
        draft = request.draft
        if draft is not None and draft.channel is channel:
            log_worker_request(logger, logging.DEBUG, request.request_id, "its draft is detached")
            self.source.end_credit(request)
            request.draft = None
            self._state.outbox.append(
                DraftDetached(
                    request_id=request.request_id,
                    target_epoch=request.target_epoch,
                    draft_epoch=draft.draft_epoch,
                )
            )
        self.features.detach(request, channel)

    def _hear_peers(self) -> None:
        for channel, message in self.channels.receive():
            self.submit_peer(channel, message)

    # --- steps -----------------------------------------------------------------------------------

    def step(self) -> list[Any]:
        """Launch one forward over whatever is queued, commit and answer what is computed.

        Returns: TargetAdmitted, AcceptedPath, FeatureChunk, RequestFailure, RequestRetracted,
            DraftDetached.
        """
        self.pipeline.step(waits=self._window_wait_s > 0)
        self._forget_rows()
        outputs = self._state.outbox.copy()
        self._state.outbox.clear()
        return outputs
