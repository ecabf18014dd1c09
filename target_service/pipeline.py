"""The step of a target: plan -> pack -> launch -> read -> commit -> answer.

On a GPU steps overlap: a step is launched before the result of the one before is read, so that the
device does not wait for the host. A round of the root alone needs nothing of that result but the
root's token, which the device has. What turns out to be past the end of a request is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shared.step.read_back import PendingRead
from shared.step.step_timer import StepTimer
from target_service.answers import UnansweredStep
from target_service.batch import StepBatch
from target_service.commit import (
    CommittedPath,
    accepted_nodes,
    commit_chains,
    commit_path,
    rows_with_nonfinite,
)
from target_service.engine_state import EngineState
from target_service.launch_time import LaunchTime
from target_service.nodes import SampledTrees
from target_service.phases import PathOutputs
from target_service.request import Phase
from target_service.request_table import RequestTable
from target_service.round_times import RoundTimes
from target_service.runner import TargetRunner
from target_service.scheduler import Scheduler, StepPlan
from target_service.tree_source import TreeSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step that the device works on.

    Args:
        has_device_round: It takes trees from the mailbox, or posts paths there: the device waits
            for the trees that follow them in the next step, which must not be behind another.
    """

    batch: StepBatch
    read: PendingRead
    timer: StepTimer
    has_device_round: bool


@dataclass(kw_only=True)
class Pipeline:
    """Advances requests step by step.

    Args:
        hear_peers: Takes what drafts' engines have sent.
        flush_peers: Sends what is queued for them.
        launch_time: Says when to launch a step behind the one in flight; None: at once.
        in_flight: The step that was launched and not read yet.
        unanswered: The step that was committed last, until a step is launched that was more urgent.
    """

    state: EngineState
    runner: TargetRunner
    scheduler: Scheduler
    source: TreeSource
    table: RequestTable
    times: RoundTimes
    hear_peers: Callable[[], None]
    flush_peers: Callable[[], None]
    launch_time: LaunchTime | None = None
    in_flight: LaunchedStep | None = None
    unanswered: UnansweredStep | None = None

    @property
    def delay_s(self) -> float:
        """Return how long nothing is to be done: the step in flight goes on, seconds."""
        step = self.in_flight
        if self.launch_time is None or step is None or step.read.is_done:
            return 0.0
        if not self._may_launch_beside(step):
            return 0.0
        return self.launch_time.delay_s

    def step(self, *, waits: bool) -> None:
        """Launch a step; commit and answer the one before, and without overlap this one too.

        Args:
            waits: Trees that are here wait for others, unless some come from the mailbox.
        """
        self.answer()
        before, launched = self.in_flight, None
        if before is None:
            plan = self.source.plan_early(self.scheduler)
            if plan is None:
                plan = StepPlan() if waits else self.scheduler.plan()
            launched = self.launch(plan)
        elif self._may_launch_beside(before):
            launched = self.launch(StepPlan() if waits else self.scheduler.plan())
        if before is not None:
            self.finish(before)
        if launched is not None and not self.scheduler.overlaps_steps:
            self.finish(launched)
            launched = None
        self.in_flight = launched
        # A step that is launched right away comes before what nobody's device waits for.
        is_urgent = launched is None and self.source.can_launch_early(self.scheduler)
        if not (is_urgent and self.scheduler.overlaps_steps):
            self.answer()
            self.state.features.send()
        window = self.source.window
        if window.is_growing and not is_urgent:  # nothing is left to do once the trees come
            self.scheduler.reserve_early(window.growing)
            self.runner.bring_page_table()
        self.state.recorder.end_step()

    def launch_early(self) -> bool:
        """Launch a step with trees that the device is to wait for; then answer the one before.

        Returns: Whether there are any such trees.
        """
        plan = None if self.in_flight is not None else self.source.plan_early(self.scheduler)
        if plan is not None:
            self.in_flight = self.launch(plan)
        later = self.state.outbox.copy()  # such as that a request had to make room
        self.state.outbox.clear()
        self.answer()
        self.state.outbox.extend(later)
        if plan is not None:
            self.state.features.send()
        return plan is not None

    def _may_launch_beside(self, before: LaunchedStep) -> bool:
        """Return whether a step is launched while the one before is in flight.

        Not where trees from the mailbox come next, which would wait for that step.
        """
        if before.has_device_round:
            return False
        return not self.source.can_launch_early(self.scheduler)

    def launch(self, plan: StepPlan) -> LaunchedStep | None:
        """Launch the rows of a plan; nothing waits for the device."""
        self.table.answer_plan(plan)
        for request in plan.admitted:
            self.runner.sampler.start(request)
        if plan.is_empty:
            return None
        runner, source, began_s = self.runner, self.source, time.monotonic()
        timer = self.state.recorder.step(request.request_id for request in plan.verifies)
        batch = runner.pack(plan, source)
        timer.host("pack")
        taken, has_device_round = None, False
        if batch.mailbox_trees is not None:
            assert batch.trees is not None
            num_rows = batch.trees.num_device_nodes
            taken = source.take_trees(batch.mailbox_trees, batch.extend, num_rows)
            has_device_round = True
            timer.device("take")
        extended = runner.compute(batch)
        timer.device("forward")
        verified = None
        if batch.trees is not None:
            verify = runner.pack_verify(batch, batch.trees, source, taken)
            has_device_round = has_device_round or verify.posts_paths
            verified = runner.verify(verify, extended, source.post_paths)
        timer.device("sample")  # before the read, which is all that is waited for
        # Before the next step is launched: that step overwrites what this one computes.
        read = runner.start_read(batch, extended, verified)
        self.table.note_launch(plan, batch)
        if self.launch_time is not None:
            self.launch_time.launched(batch.num_rows, began_s)
        return LaunchedStep(batch=batch, read=read, timer=timer, has_device_round=has_device_round)

    def finish(self, launched: LaunchedStep) -> None:
        """Wait for a launched step, commit and answer it."""
        batch, timer = launched.batch, launched.timer
        is_device_round = batch.mailbox_trees is not None
        if is_device_round:  # what drafts say of these trees is old once the device is done
            self.hear_peers()
        was_done = launched.read.is_done
        outputs = self.runner.finish_read(batch, launched.read)
        timer.host("read")
        self._note_end(batch, was_awaited=not was_done)
        if is_device_round and timer.is_on:  # but for the times of these trees
            self.hear_peers()
        commit_chains(self.state, batch, outputs)
        if batch.trees is not None:
            assert outputs.paths is not None
            self._commit_paths(batch.trees, outputs.paths, timer)

    def _note_end(self, batch: StepBatch, *, was_awaited: bool) -> None:
        """Learn from when a step ended what steps take."""
        if self.launch_time is not None:
            self.launch_time.ended(was_awaited=was_awaited)
        if self.scheduler.prompt_budget is not None:
            has_prompts = bool(batch.chains)
            self.scheduler.prompt_budget.note_step(batch.num_rows, has_prompts=has_prompts)

    def _commit_paths(self, trees: SampledTrees, paths: PathOutputs, timer: StepTimer) -> None:
        """Advance every request by its path; attached drafts hear of the paths first."""
        self.answer()
        state = self.state
        nodes = list(accepted_nodes(trees, paths))
        self.source.order_next(trees, nodes, paths.features)
        step = self.times.end_step(timer)
        failed = rows_with_nonfinite(paths)
        committed = []
        for row, (request, path) in enumerate(zip(trees.requests, nodes, strict=True)):
            if not state.is_held(request):
                continue
            if row in failed:
                self.table.fail_numerically(request)
                continue
            is_timed = request.open.is_timed and request.phase is not Phase.PREFILL
            cut = commit_path(request, path, state.max_context_len)
            times, round_idx = None, request.round_idx
            if is_timed:
                on_device = row < trees.num_on_device
                key = (request.request_id, round_idx)
                times = self.times.of_answer(*key, step, is_device_round=on_device)
            committed.append(CommittedPath(request, row, path, cut, round_idx, times))
            if cut.reason:
                self.table.drop(request)
            else:
                self.source.order(request)
        if not trees.num_on_device:  # else the next step is launched first
            self.flush_peers()
        going_on = [(c.request, c.path.token_ids) for c in committed if not c.cut.reason]
        self.runner.sampler.count(going_on)
        self.unanswered = UnansweredStep(committed=committed, paths=paths)

    def answer(self) -> None:
        """Answer what was committed last, and keep its features."""
        step, self.unanswered = self.unanswered, None
        if step is not None:
            step.answer(self.state)
