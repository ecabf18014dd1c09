"""The step of a target: plan -> pack -> launch -> read -> order, commit -> answer -> learn.

On a GPU steps overlap: step n + 1 is launched before the result of step n is read, so that the
device does not wait for the host. A round in step n + 1 needs three things: the root's token and
the root's slot, which step n has left on the device, and a tree, which the draft's device brings
(device rounds) or which has already come (other rounds). A round that turns out to be past the end
of its request is thrown away.

Learning comes last, and what it decides about trees holds for later orders: when it runs, the next
step is launched already, or, without overlap, drafts already have their orders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.step.read_back import PendingRead
from shared.step.step_timer import StepTimer
from target_service.answers import answer_paths
from target_service.batch import StepBatch
from target_service.commit import (
    CommittedPath,
    accepted_nodes,
    commit_chains,
    commit_path,
    follows_grammar,
    rows_with_nonfinite,
)
from target_service.engine_state import EngineState
from target_service.launch_time import LaunchTime
from target_service.nodes import SampledTrees
from target_service.phases import PathOutputs
from target_service.request_table import RequestTable
from target_service.round_times import RoundTimes
from target_service.runner import TargetRunner
from target_service.scheduler import Scheduler, StepPlan
from target_service.tree_source import TreeSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step that was launched and not read yet.

    Args:
        began_s: When the host began to plan the step, monotonic.
        batch: The rows of the step.
        read: The copy of its result to the host.
        timer: Times its stages.
        launched_ns: When the host began to launch the step, monotonic.
    """

    began_s: float
    batch: StepBatch
    read: PendingRead
    timer: StepTimer
    launched_ns: int


@dataclass(kw_only=True)
class Pipeline:
    """Advances requests step by step.

    Args:
        hear_peers: Receives messages from drafts' engines.
        flush_peers: Sends messages that are queued for drafts' engines.
        launch_time: Says when to launch the next step behind the one in flight.
        in_flight: The step that was launched and not read yet.
    """

    state: EngineState
    runner: TargetRunner
    scheduler: Scheduler
    source: TreeSource
    table: RequestTable
    times: RoundTimes
    hear_peers: Callable[[], None]
    flush_peers: Callable[[], None]
    launch_time: LaunchTime
    in_flight: LaunchedStep | None = None

    def step(self, *, waits: bool) -> None:
        """Launch a step; commit and answer the step before, and without overlap this step too; then
        learn.

        Args:
            waits: Launch nothing: trees that have come wait for trees that are being grown.
        """
        clock = self.state.counts.tallies.clock
        began_s = clock.begin() / 1e9
        plan = StepPlan() if waits else self.source.plan(self.scheduler)
        clock.end("plan")
        before, self.in_flight = self.in_flight, self.launch(plan, began_s)
        if before is not None:
            self.finish(before)
        if self.in_flight is not None and not self.scheduler.overlaps_steps:
            launched, self.in_flight = self.in_flight, None
            self.finish(launched)
        self.state.features.send()
        window = self.source.window
        if window.is_growing:  # so that this need not be done once the trees come
            self.scheduler.reserve_early(window.growing)
            self.runner.bring_page_table()
        self.state.recorder.end_step()
        clock.end("send")
        self.source.learn()
        clock.end("learn")

    def launch(self, plan: StepPlan, began_s: float) -> LaunchedStep | None:
        """Launch the rows of a plan, without waiting for the device.

        Args:
            began_s: When the host began to plan the step, monotonic.
        Returns: None if the plan has no rows.
        """
        runner, source, clock = self.runner, self.source, self.state.counts.tallies.clock
        self.table.answer_plan(plan)
        for request in plan.admitted:
            runner.sampler.start(request)
        if plan.is_empty:
            return None
        source.begin_prompts([work.request for work in plan.prefills if not work.start])
        timer = self.state.recorder.step(request.request_id for request in plan.verifies)
        batch = runner.pack(plan, source)
        timer.host("pack")
        launched_ns = clock.end("pack")
        taken = runner.take_trees(batch, source)
        if taken is not None:
            timer.device("take")
        extended = runner.compute(batch)
        self.launch_time.launched(batch.num_rows, began_s)  # from here on the device is busy
        timer.device("forward")
        verified = runner.verify_trees(batch, taken, extended, source)
        timer.device("sample")  # before the read: nothing after the read is waited for
        # Before the next step is launched: that step overwrites what this one computes.
        read = runner.start_read(batch, extended, verified)
        self.table.note_launch(plan, batch)
        clock.end("launch")
        return LaunchedStep(
            began_s=began_s, launched_ns=launched_ns, batch=batch, read=read, timer=timer
        )

    def finish(self, launched: LaunchedStep) -> None:
        """Wait for the result of a launched step, commit and answer it."""
        batch, timer, counts = launched.batch, launched.timer, self.state.counts
        is_device_round = batch.mailbox_trees is not None
        if is_device_round:  # messages of drafts about these trees, before the device is done
            self.hear_peers()
        was_awaited = not launched.read.is_done
        outputs = self.runner.finish_read(batch, launched.read)
        timer.host("read")
        counts.note_read(launched.launched_ns, counts.tallies.clock.end("wait"))
        self.launch_time.ended(was_awaited=was_awaited)
        self.scheduler.note_step(
            batch.num_rows, num_chain_rows=batch.num_chain_rows, began_s=launched.began_s
        )
        if is_device_round and timer.is_on:  # again: these messages have the draft's times
            self.hear_peers()
        commit_chains(self.state, batch, outputs)
        if batch.trees is not None:
            assert outputs.paths is not None
            self._commit_paths(batch.trees, outputs.paths, timer, is_clean=not batch.chains)
        counts.tallies.clock.end("commit")

    def _commit_paths(
        self, trees: SampledTrees, paths: PathOutputs, timer: StepTimer, *, is_clean: bool
    ) -> None:
        """Advance every request by its path and answer it; before that, send the paths to attached
        drafts (`TreeSource.order_next`).

        Args:
            is_clean: The step had rows of trees only.
        """
        nodes = list(accepted_nodes(trees, paths))
        self.source.order_next(trees, nodes, paths.features)
        self.source.note_step(trees, nodes, is_clean=is_clean)
        step = self.times.end_step(timer)
        failed, committed = rows_with_nonfinite(paths), []
        for row, (request, path) in enumerate(zip(trees.requests, nodes, strict=True)):
            if not self.state.is_held(request):
                continue
            if row in failed:
                self.table.fail_numerically(request)
                continue
            cut = commit_path(request, path, self.state.info.max_context_len)
            if not follows_grammar(request, path, cut):
                self.table.fail_grammar(request)
                continue
            times = self.times.of_answer(request, step, is_device_round=row < trees.num_on_device)
            committed.append(CommittedPath(request, row, path, cut, request.round_idx, times))
            if cut.reason:
                self.table.drop(request)
            else:
                self.source.order(request)
                request.queue_forced()
        self.flush_peers()
        going_on = [(c.request, c.path.token_ids) for c in committed if not c.cut.reason]
        self.runner.sampler.count(going_on)
        answer_paths(self.state, committed, trees, paths)
