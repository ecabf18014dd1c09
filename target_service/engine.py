"""The target engine: admit, plan, extend, verify, commit, answer. Single-threaded.

On a GPU a step is launched before the result of the one before is read, so that the device does not
wait for the host: a granted round of the root alone needs nothing of that result but the root's
token, which the device has. What turns out to be past the end of a request is thrown away.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import (
    CoppiceError,
    InvalidArgumentError,
    NonFiniteError,
    NotFoundError,
    StaleStateError,
)
from shared.kernels.dispatch import launch_counts
from shared.messages import (
    AnswerTimes,
    Credit,
    CreditUpdate,
    DraftDetached,
    FeatureAck,
    FeatureChunk,
    FeatureFailure,
    FeatureSubscribe,
    FeatureUnsubscribe,
    FinishReason,
    PeerAttach,
    PeerDetach,
    RequestFailure,
    RequestRetracted,
    RootOnly,
    StageTime,
    TargetAdmitted,
    TargetClose,
    TargetOpen,
    TreeBatch,
    VerifyRound,
    WorkerInfo,
    WorkerLoad,
)
from shared.peer.channel import PeerChannel, PeerChannels, PeerLost
from shared.peer.mailbox import Mailbox
from shared.peer.ring import FeatureRing
from shared.step.read_back import PendingRead
from shared.step.step_timer import StepTimer
from shared.times import clock_id, take
from shared.tree import check_tree
from target_service.batch import SampledTrees, StepBatch, build_batch, build_verify
from target_service.batch_window import BatchWindow
from target_service.commit import accepted_nodes, commit_path
from target_service.features import MAX_CHUNK_BYTES, FeatureLog
from target_service.peer_rounds import PeerRounds
from target_service.request import Phase, QueuedRound, TargetRequest
from target_service.runner import PathOutputs, StepOutputs, TargetRunner
from target_service.scheduler import PrefillWork, Scheduler, StepPlan
from target_service.step_costs import StepCosts

logger = logging.getLogger(__name__)

MAX_PENDING_SUBSCRIPTIONS = 4096
FeatureRows = NDArray[np.uint8]
"""[n, row_bytes]"""


@dataclass(slots=True, kw_only=True)
class _Launched:
    """A step that the device works on.

    Args:
        timer: Measures it if one of its requests is timed.
        order_times: Of the orders of timed rounds, by request.
        device_free_ns: When the timed step before had left the device.
    """

    batch: StepBatch
    read: PendingRead
    timer: StepTimer
    order_times: Mapping[str, AnswerTimes]
    device_free_ns: int = 0


class TargetEngine:
    """Requests and the step that advances them.

    Args:
        runs_ahead: Launch a step before the result of the one before is read.
        channels: To drafts on this host; None: there are none.
        costs: Of forwards; None: trees never wait for others.
        window: Sliding window of the target's attention, tokens; 0 = none.
        max_context_len: Longest sequence, prompt and output.
        feature_retain_rows: Feature rows kept per request until acknowledged.
        ring: Carries rows to drafts on this host; None: rows travel in the messages.
        mailbox: Through which the devices of drafts on this host and of this target talk; None:
            their hosts do.
    """

    def __init__(
        self,
        runner: TargetRunner,
        info: WorkerInfo,
        *,
        max_batch_rows: int,
        prefill_chunk_len: int,
        max_context_len: int,
        feature_retain_rows: int,
        runs_ahead: bool = False,
        window: int = 0,
        ring: FeatureRing | None = None,
        mailbox: Mailbox | None = None,
        channels: PeerChannels | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        self.info = info
        self.channels = channels or PeerChannels()
        self._in_flight: _Launched | None = None
        self._runner = runner
        self._pool = runner.pool
        self._window = window
        self._max_context_len = max_context_len
        self._retain_rows = feature_retain_rows
        self._ring = ring
        self._mailbox = mailbox
        self._scheduler = Scheduler(
            runner.pool,
            max_batch_rows=max_batch_rows,
            prefill_chunk_len=prefill_chunk_len,
            runs_ahead=runs_ahead,
        )
        self._requests: dict[str, TargetRequest] = {}
        self._early_subscriptions: dict[str, FeatureSubscribe] = {}
        self._batch_window = BatchWindow(costs)
        self._has_rows: bool | None = None  # None: not known
        self._num_tree_rows: int | None = None
        self._order = itertools.count()
        self._direct = PeerRounds(
            self._requests,
            self._batch_window,
            info,
            order=self._order,
            ring=ring,
            has_mailbox=mailbox is not None,
            max_context_len=max_context_len,
        )
        self._outbox: list[Any] = []
        self._num_steps = self._num_rows = self._num_request_steps = self._num_moved = 0
        self._busy_until_ns = 0  # when the last step ended
        self._device_free_ns = 0  # when the last timed step had left the device

    @property
    def has_work(self) -> bool:
        """Return whether a step would do anything."""
        if self._outbox or self._in_flight:
            return True
        if self._has_rows is None:
            self._has_rows = self._scheduler.has_work
        return self._has_rows and not self._window_wait_s

    @property
    def has_work_in_s(self) -> float | None:
        """Return how long trees that are here wait for others at most; None = none waits."""
        return self._window_wait_s or None

    @property
    def _window_wait_s(self) -> float:
        """Return how long to wait for trees that are being grown; with other work, not at all."""
        if not self._batch_window.is_awaited:
            return 0.0
        if self._num_tree_rows is None:
            self._num_tree_rows = self._scheduler.num_tree_rows
        return self._batch_window.wait_s(self._num_tree_rows) if self._num_tree_rows else 0.0

    def _forget_rows(self) -> None:
        """Look anew at what could be computed: something has changed."""
        self._has_rows = self._num_tree_rows = None

    @property
    def load(self) -> WorkerLoad:
        """Return progress and room."""
        return WorkerLoad(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_free_pages=self._pool.num_free_pages,
            num_pages=self._pool.num_pages,
            num_steps=self._num_steps,
            num_rows=self._num_rows,
            num_request_steps=self._num_request_steps,
            kernel_launches=tuple(sorted(launch_counts().items())),
            num_moved_rounds=self._num_moved,
        )

    def submit(self, message: Any) -> None:
        """Take a message; a bad one is answered and changes nothing."""
        self._forget_rows()
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
                    self._close(message)
                case FeatureSubscribe():
                    self._subscribe(message, None)
                case FeatureAck():
                    self._acknowledge(message, None)
                case FeatureUnsubscribe():
                    self._unsubscribe(message)
                case _:
                    raise TypeError(f"a target engine takes no {type(message).__name__}")
        except CoppiceError as error:
            failure = _failure(message, error)
            is_feature = isinstance(message, FeatureSubscribe)
            self._outbox.append(FeatureFailure(failure=failure) if is_feature else failure)

    def submit_peer(self, channel: PeerChannel, message: Any) -> None:
        """Take what a draft's engine says; a wrong tree is the orchestrator's to hear of."""
        self._forget_rows()
        try:
            match message:
                case TreeBatch():
                    for tree, error in self._direct.take(channel, message):
                        self._outbox.append(_failure(tree, error))
                case FeatureSubscribe():
                    self._subscribe(message, channel)
                case FeatureAck():
                    self._acknowledge(message, channel)
                case PeerAttach():
                    self._direct.open(message, channel)
                case PeerDetach():
                    request = self._requests.get(message.request_id)
                    if request is not None and request.draft_epoch == message.draft_epoch:
                        self._detach(request, channel)
                case PeerLost():
                    for request in self._requests.values():
                        self._detach(request, channel)
                case _:
                    raise TypeError(f"a target engine is told no {type(message).__name__}")
        except CoppiceError as error:
            failure = _failure(message, error)
            if isinstance(message, FeatureSubscribe):
                channel.put(failure)
            else:
                self._outbox.append(failure)

    def step(self) -> list[Any]:
        """Launch one forward over whatever is queued, commit and answer what is computed.

        Returns: TargetAdmitted, AcceptedPath, FeatureChunk, RequestFailure, RequestRetracted,
            DraftDetached.
        """
        if self._in_flight is not None and self._in_flight.read.is_done:
            launched = None  # what is computed is answered at once; the next step launches
        else:
            awaits_mail = self._in_flight is None and self._scheduler.await_mail()
            waits = not awaits_mail and self._window_wait_s
            plan = StepPlan() if waits else self._scheduler.plan()
            launched = self._launch(plan)
        if self._in_flight is not None:
            self._finish(self._in_flight)
        self._in_flight = launched
        if launched is not None and not self._scheduler.runs_ahead:
            self._finish(launched)
            self._in_flight = None
        for request in self._requests.values():
            self._send_features(request)
            # A replay in flight ends where the rows held begin: they must not go meanwhile.
            if request.features is not None and not request.is_replaying:
                request.features.trim()
        if self._ring is not None:
            self._ring.start_step()
        self._forget_rows()
        if not self._scheduler.can_await_mail:  # else their step is launched right away
            self._reserve_ahead()
        outbox, self._outbox = self._outbox, []
        self._busy_until_ns = time.monotonic_ns()
        return outbox

    def launch_awaited(self) -> None:
        """Launch the step of trees that are being grown, if the device is to wait for them."""
        if self._in_flight is None and self._scheduler.await_mail():
            self._in_flight = self._launch(self._scheduler.plan())
            self._forget_rows()

    def check_integrity(self) -> None:
        """Raise unless every page is accounted for."""
        self._pool.check_integrity()

    def _launch(self, plan: StepPlan) -> _Launched | None:
        """Launch the rows of a plan; nothing waits for the device."""
        for request in plan.retracted:
            self._direct.end(request)
            del self._requests[request.request_id]
            self._outbox.append(
                RequestRetracted(
                    request_id=request.request_id, target_epoch=request.open.target_epoch
                )
            )
        for request in plan.admitted:
            self._runner.sampler.start(request)
            self._outbox.append(
                TargetAdmitted(
                    request_id=request.request_id,
                    target_epoch=request.open.target_epoch,
                    times=AnswerTimes(clock_id=clock_id(), begin_ns=time.monotonic_ns()),
                )
            )
        if plan.is_empty:
            return None
        timer = StepTimer(
            self._pool.device, is_on=any(request.open.is_timed for request in plan.verifies)
        )
        batch = build_batch(
            plan,
            self._pool,
            self._runner.extend_staging,
            window=self._window,
            pads_rows=self._runner.pads_rows,
            mailbox=self._mailbox,
        )
        timer.host("pack")
        taken = self._runner.take_trees(batch)
        if taken is not None:
            timer.device("await")
        extended = self._runner.extend(batch.extend)
        timer.device("forward")
        verified = None
        if batch.trees is not None:
            verify = build_verify(
                batch.trees,
                batch.logit_rows,
                self._runner.verify_staging,
                self._runner.sampler,
                taken=taken,
                mailbox=self._mailbox,
            )
            verified = self._runner.verify(verify, extended)
            self._runner.commit_kv(verify, verified)
        timer.device("sample")  # before the read, which is all that is waited for
        # Before the next step is launched: that one overwrites what this one computes.
        read = self._runner.start_read(batch, extended, verified)
        order_times = {}
        for chain in batch.chains:
            if isinstance(chain.work, PrefillWork):
                chain.work.request.seq_len = chain.work.stop
            else:
                chain.work.request.is_replaying = True
        for request in batch.trees.requests if batch.trees else ():
            request.is_tree_in_flight = request.next_num_rows > 1
            request.queued = request.mailed = request.draft_times = None
            self._batch_window.gave_up(
                request.request_id
            )  # if the device waits, no other tree does
            if request.queued_times is not None:
                order_times[request.request_id] = request.queued_times
                request.queued_times = None
            request.queued_order = next(self._order)
            request.num_in_flight += 1
        self._num_steps += 1
        self._num_rows += batch.num_rows
        self._num_request_steps += len(plan.verifies) + len(plan.prefills) + len(plan.replays)
        return _Launched(batch=batch, read=read, timer=timer, order_times=order_times)

    def _finish(self, launched: _Launched) -> None:
        """Wait for a launched step, commit and answer it."""
        trees = launched.batch.trees
        is_awaited = trees is not None and trees.awaited is not None
        if is_awaited:  # what drafts say meanwhile is old by now: not after the device is done
            self._hear_peers()
        outputs = self._runner.finish_read(launched.batch, launched.read)
        launched.timer.host("read")
        if is_awaited and launched.timer.is_on:  # but for the times of these trees
            self._hear_peers()
        self._commit_chains(launched.batch, outputs)
        if trees is not None:
            assert outputs.paths is not None
            self._commit_paths(launched, trees, outputs.paths)

    def _hear_peers(self) -> None:
        for channel, message in self.channels.receive():
            self.submit_peer(channel, message)

    def _reserve_ahead(self) -> None:
        """Reserve for trees that are being grown, so that nothing is left to do once they come."""
        if self._batch_window.is_awaited:
            for request_id, num_rows in self._batch_window.coming:
                self._scheduler.reserve_ahead(request_id, num_rows)
            self._runner.bring_page_table()

    def _is_held(self, request: TargetRequest) -> bool:
        """Return whether a request is still there; it may have gone while a step was in flight."""
        return self._requests.get(request.request_id) is request

    # --- messages --------------------------------------------------------------------------------

    def _open(self, message: TargetOpen) -> None:
        known = self._requests.get(message.request_id)
        if known is not None:
            if known.open.target_epoch >= message.target_epoch:
                raise StaleStateError(
                    f"target_epoch {message.target_epoch} is not newer than the open one",
                    field="target_epoch",
                )
        num_tokens = len(message.token_ids)
        if not 1 <= message.num_prompt_tokens <= num_tokens:
            raise InvalidArgumentError(
                f"num_prompt_tokens is {message.num_prompt_tokens}, expected 1..{num_tokens}",
                field="num_prompt_tokens",
            )
        self._check_ids(message.token_ids, "token_ids")
        if num_tokens >= self._max_context_len:
            raise InvalidArgumentError(
                f"{num_tokens} tokens leave no room in a context of {self._max_context_len}",
                reason="PROMPT_TOO_LONG",
                field="token_ids",
            )
        self._check_ids(message.stopping.stop_token_ids, "stopping.stop_token_ids")
        bias_ids = [token_id for token_id, _ in message.sampling.logit_bias]
        self._check_ids(bias_ids, "sampling.logit_bias")
        if known is not None:
            self._drop(known)
        request = TargetRequest(
            open=message,
            order=next(self._order),
            tokens=list(message.token_ids),
            token_limit=min(
                message.num_prompt_tokens + message.stopping.max_new_tokens, self._max_context_len
            ),
        )
        if message.wants_features and self._runner.features.width:
            request.features = FeatureLog(row_bytes=self._row_bytes, retain_rows=self._retain_rows)
        self._requests[message.request_id] = request
        self._scheduler.enqueue(request)
        early = self._early_subscriptions.pop(message.request_id, None)
        if early is not None:
            self.submit(early)

    def _queue_round(self, message: VerifyRound) -> None:
        request = self._find(message.request_id, message.target_epoch)
        self._direct.end(request)
        if request.last_reply is not None and message.round_idx == request.round_idx:
            self._outbox.append(request.last_reply)
            return
        if request.round_idx < message.round_idx <= request.round_idx + request.num_in_flight:
            return  # its answer is on the way
        if 0 < message.round_idx <= request.ordered_round and (
            message.round_idx <= request.round_idx or request.queued is not None
        ):
            return  # so is that of a round whose tree came over the channel
        if request.phase is not Phase.RUNNING or message.round_idx != request.round_idx + 1:
            raise StaleStateError(
                f"round {message.round_idx} cannot follow round {request.round_idx}",
                field="round_idx",
            )
        if message.seq_len != request.seq_len:
            raise StaleStateError(
                f"seq_len is {message.seq_len}, expected {request.seq_len}", field="seq_len"
            )
        if message.root_token_id != request.tokens[-1]:
            raise StaleStateError(
                f"root_token_id is {message.root_token_id}, the bonus token is "
                f"{request.tokens[-1]}",
                field="root_token_id",
            )
        if message.tree is not None:
            check_tree(
                message.tree.token_ids,
                message.tree.parent_index,
                root_token_id=request.tokens[-1],
                vocab_size=self.info.vocab_size,
            )
        request.queued = QueuedRound(message.tree)
        if request.open.is_timed:
            request.queued_times = take(message.received_ns, busy_until_ns=self._busy_until_ns)
        request.queued_order = next(self._order)

    def _extend_credit(self, message: VerifyRound | CreditUpdate, credit: Credit) -> None:
        request = self._find(message.request_id, message.target_epoch)
        if isinstance(credit.trees, RootOnly):
            request.granted_until = max(request.granted_until, credit.until_round_idx)
            request.queued_order = next(self._order)
        else:
            self._direct.grant(request, credit.until_round_idx, credit.trees)

    def _detach(self, request: TargetRequest, channel: PeerChannel) -> None:
        """Forget a draft's channel; who wants the features asks again through the front."""
        if request.channel is channel:
            self._direct.end(request)
            request.channel = None
            self._outbox.append(
                DraftDetached(
                    request_id=request.request_id,
                    target_epoch=request.open.target_epoch,
                    draft_epoch=request.draft_epoch,
                )
            )
        if request.feature_channel is channel:
            assert request.features is not None
            request.feature_channel = request.features.next = None

    def _close(self, message: TargetClose) -> None:
        request = self._requests.get(message.request_id)
        if request is not None and request.open.target_epoch <= message.target_epoch:
            self._drop(request)

    def _subscribe(self, message: FeatureSubscribe, channel: PeerChannel | None) -> None:
        request = self._requests.get(message.request_id)
        if request is None or request.open.target_epoch < message.target_epoch:
            if channel is not None:
                raise NotFoundError(f"no request {message.request_id!r} here", field="request_id")
            # The draft's open may overtake the target's: keep the subscription for it.
            if len(self._early_subscriptions) >= MAX_PENDING_SUBSCRIPTIONS:
                self._early_subscriptions.pop(next(iter(self._early_subscriptions)))
            self._early_subscriptions[message.request_id] = message
            return
        if request.open.target_epoch > message.target_epoch:
            raise StaleStateError(
                f"target_epoch {message.target_epoch} is over", field="target_epoch"
            )
        newest_epoch = max(request.draft_epoch, request.feature_epoch)
        is_older = 0 < message.draft_epoch < newest_epoch
        if is_older or (channel is not None and request.channel is not channel):
            raise StaleStateError(
                "a newer draft takes this request's features", reason="SUBSCRIPTION_REPLACED"
            )
        if request.features is None:
            raise InvalidArgumentError(
                "this request keeps no features; open it with wants_features on a target that "
                "was started with the draft's checkpoint",
                field="request_id",
            )
        if not 0 <= message.from_position <= len(request.tokens):
            raise InvalidArgumentError(
                f"from_position is {message.from_position}, expected 0..{len(request.tokens)}",
                field="from_position",
            )
        reads_ring = self._ring is not None and message.ring_nonce == self._ring.nonce
        if message.ring_nonce and not reads_ring:
            logger.warning("a draft read another feature ring than this target's; it gets bytes")
        request.feature_channel = channel
        request.feature_epoch = max(request.feature_epoch, message.draft_epoch)
        request.features.subscribe(message.from_position, reads_ring=reads_ring or bool(channel))
        self._send_features(request)

    def _unsubscribe(self, message: FeatureUnsubscribe) -> None:
        early = self._early_subscriptions.get(message.request_id)
        if early is not None and early.target_epoch <= message.target_epoch:
            del self._early_subscriptions[message.request_id]
        log = self._feature_log(message, None)
        if log is not None:
            log.next = None

    def _acknowledge(self, message: FeatureAck, channel: PeerChannel | None) -> None:
        log = self._feature_log(message, channel)
        if log is not None:
            log.acknowledge(message.position)

    def _feature_log(
        self, message: FeatureAck | FeatureUnsubscribe, channel: PeerChannel | None
    ) -> FeatureLog | None:
        """Return the rows that a message is about, if they go where it came from."""
        request = self._requests.get(message.request_id)
        if request is None or request.open.target_epoch != message.target_epoch:
            return None
        return request.features if request.feature_channel is channel else None

    def _check_ids(self, token_ids: Sequence[int], field: str) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.info.vocab_size:
            raise InvalidArgumentError(
                f"{field} must lie in 0..{self.info.vocab_size - 1}", field=field
            )

    def _find(self, request_id: str, target_epoch: int) -> TargetRequest:
        request = self._requests.get(request_id)
        if request is None:
            raise NotFoundError(f"no request {request_id!r} here", field="request_id")
        if request.open.target_epoch != target_epoch:
            raise StaleStateError(
                f"target_epoch is {target_epoch}, expected {request.open.target_epoch}",
                field="target_epoch",
            )
        return request

    def _drop(self, request: TargetRequest) -> None:
        self._scheduler.remove(request)
        self._direct.end(request)
        del self._requests[request.request_id]

    # --- a step ----------------------------------------------------------------------------------

    @property
    def _row_bytes(self) -> int:
        return self._runner.features.width * self._runner.model.dtype.itemsize

    def _commit_chains(self, batch: StepBatch, outputs: StepOutputs) -> None:
        """Commit prefill chunks; hand replayed features to their subscriber."""
        for chain, rows in zip(batch.chains, outputs.chain_features, strict=True):
            work = chain.work
            request = work.request
            request.is_replaying = False
            if request.features is None or not self._is_held(request):
                continue
            assert rows is not None
            if isinstance(work, PrefillWork):
                request.features.append(work.start, rows.copy())
            elif request.features.next == work.start:  # else somebody subscribed anew meanwhile
                self._emit_features(request, work.start, rows)
                request.features.next = work.stop

    def _commit_paths(self, launched: _Launched, trees: SampledTrees, paths: PathOutputs) -> None:
        """Advance every request by its path; drafts that are attached hear of it first."""
        nodes = list(accepted_nodes(trees, paths))
        self._direct.order_next(trees, nodes, paths)
        launched.device_free_ns = self._device_free_ns
        stages = launched.timer.stages(device_free_ns=self._device_free_ns)
        self._device_free_ns = launched.timer.device_end_ns(stages)
        advanced: list[tuple[TargetRequest, tuple[int, ...]]] = []
        for row, (request, path) in enumerate(zip(trees.requests, nodes, strict=True)):
            if not self._is_held(request):
                continue
            is_prefill = request.phase is Phase.PREFILL
            if not paths.is_finite[row, : len(path.token_ids)].all():
                self._fail_numerically(request)
                continue
            reply = commit_path(request, path, paths, row, max_context_len=self._max_context_len)
            if request.open.is_timed and not is_prefill:
                reply = replace(reply, times=_times_of(launched, request, stages))
            self._outbox.append(reply)
            self._num_moved += reply.accept_index != tuple(range(len(reply.accept_index)))
            if reply.finish_reason is not FinishReason.NONE:
                self._drop(request)
                continue
            advanced.append((request, reply.token_ids))
            self._direct.order(request)
            if request.features is not None and not is_prefill:
                assert paths.features is not None
                rows = paths.features[row, : len(reply.token_ids)]
                request.features.append(path.seq_len, rows.copy())
        if trees.awaited is None:  # else the next step is launched first
            self.channels.flush()
        self._runner.sampler.count(advanced)

    def _fail_numerically(self, request: TargetRequest) -> None:
        """End a request whose logits are no numbers: whatever token were chosen would be wrong."""
        error = NonFiniteError(
            f"a logit of the token after {len(request.tokens)} tokens is NaN or infinite; the "
            "weights overflow in this dtype for this prompt. Try --dtype float32 or bfloat16"
        )
        failure = _failure(request.open, error)
        self._outbox.append(replace(failure, round_idx=request.round_idx + 1))
        self._drop(request)

    def _send_features(self, request: TargetRequest) -> None:
        if request.features is not None:
            for position, rows in request.features.take_unsent():
                self._emit_features(request, position, rows)

    def _emit_features(self, request: TargetRequest, position: int, rows: FeatureRows) -> None:
        """Queue rows [n, row_bytes] for the subscriber, at most 1 MiB a message."""
        assert request.features is not None
        ring = self._ring if request.features.reads_ring else None
        most = max(1, MAX_CHUNK_BYTES // self._row_bytes)
        for begin in range(0, len(rows), most):
            part = rows[begin : begin + most]
            span = ring.write(part) if ring is not None else None
            chunk = FeatureChunk(
                request_id=request.request_id,
                target_epoch=request.open.target_epoch,
                start=position + begin,
                shape=(len(part), self._runner.features.width),
                dtype=self.info.features.dtype,
                data=part.tobytes() if span is None else span,
            )
            if request.feature_channel is not None:
                request.feature_channel.put(chunk)
            else:
                self._outbox.append(chunk)


def _failure(message: Any, error: CoppiceError) -> RequestFailure:
    return RequestFailure(
        request_id=message.request_id,
        code=int(error.code),
        reason=error.reason,
        message=error.message,
        field=error.field,
        target_epoch=message.target_epoch,
        draft_epoch=getattr(message, "draft_epoch", 0),
        round_idx=getattr(message, "round_idx", 0),
    )


def _times_of(
    launched: _Launched, request: TargetRequest, stages: Sequence[StageTime]
) -> AnswerTimes:
    """Return how a timed round went: from its order on, if it had one, else from its step on."""
    if launched.batch.trees is not None and launched.batch.trees.awaited is not None:
        return _device_times(launched, request, stages)
    begin_ns = launched.timer.begin_ns
    times = launched.order_times.get(request.request_id)
    if times is None:
        times = AnswerTimes(clock_id=clock_id(), begin_ns=begin_ns)
    else:
        times = times.then("queue", begin_ns)
    times = replace(times, stages=(*times.stages, *stages))
    return times.then("commit", time.monotonic_ns())


def _device_times(
    launched: _Launched, request: TargetRequest, stages: Sequence[StageTime]
) -> AnswerTimes:
    """Return how a timed round went that the devices did by themselves: from the end of the step
    before, or from the launch if that one was not timed, to the end of this one, of the device.
    """
    begin_ns = launched.device_free_ns or launched.timer.begin_ns
    times = AnswerTimes(clock_id=clock_id(), begin_ns=begin_ns)
    times = times.including("draft", request.draft_times)
    names = {"await": "channel", "forward": "forward", "sample": "sample"}
    for stage in stages:
        if stage.name in names:
            times = times.then(names[stage.name], stage.end_ns)
    return times
