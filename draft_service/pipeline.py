"""One step of a draft: from rows that are ready to trees that are sent.

confirm     commit what the device has extended and grown before its orders came (device rounds)
plan        choose the rows to extend, within the step's budget
extend      launch: run committed tokens with their true features
commit      the extended rows are part of the request from here on
grow        launch: a tree from every extended root, posted if a target's device waits for it
settle      while the device works: count, free pages, reserve pages
read        wait for the device
answer      send each tree by the way that its order came
ahead       launch what the device does next without orders from its host (device rounds)
answer      send the confirmed trees last: the target's device has them already

In peer and relayed rounds `confirm` and `ahead` do nothing (`PathSource`). In device rounds the
common case is `confirm`, `ahead`, `answer` alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from draft_service.answers import GrownTrees, answer, settle_orders
from draft_service.extend_input import ExtendWork
from draft_service.growth_input import num_scratch_slots
from draft_service.growth_masks import GrowthMasks
from draft_service.path_source import PathSource
from draft_service.request import DraftRequest
from draft_service.request_table import RequestTable
from draft_service.runner import DraftRunner
from shared.grammar.threads import MatcherThreads
from shared.messages import TreeShape
from shared.metrics.engine import EngineTallies
from shared.step.recorder import Recorder
from shared.step.step_timer import StepTimer

STAGES = ("confirm", "extend", "grow", "wait", "answer", "ahead")
CHUNK_ROWS = 256


class DraftPipeline:
    """Advances all requests, a step at a time.

    Args:
        outbox: Takes messages to the front.
        source: Source of paths that the device has before its host (device rounds).
        hear_peers: Receives messages from targets' engines.
        max_batch_rows: Most rows per extend.
    """

    def __init__(
        self,
        runner: DraftRunner,
        requests: RequestTable,
        outbox: list[Any],
        source: PathSource,
        recorder: Recorder,
        *,
        hear_peers: Callable[[], None],
        max_batch_rows: int,
    ) -> None:
        self.num_steps = self.num_rows = self.num_request_steps = 0
        self.tallies = EngineTallies(STAGES)
        self.num_trees = dict.fromkeys(("overlapped", "peer", "relayed"), 0)
        self._runner = runner
        self._requests = requests
        self._outbox = outbox
        self._source = source
        self._recorder = recorder
        self._hear_peers = hear_peers
        self._max_batch_rows = max_batch_rows
        self._matcher_threads = MatcherThreads()
        self._begins_s: float | None = None  # see _work_begins_s; None: not known

    @property
    def has_work(self) -> bool:
        """Return whether there are rows to extend or trees to grow now."""
        return self._work_begins_s <= time.monotonic()

    @property
    def has_work_in_s(self) -> float | None:
        """Return for how long at most rows and trees wait for a launch ahead to end; None: there
        are none, or they need not wait.
        """
        if math.isinf(self._work_begins_s):
            return None
        return max(self._work_begins_s - time.monotonic(), 0.0) or None

    @property
    def _work_begins_s(self) -> float:
        """Return when to begin the next work, monotonic; inf: there is none until a message comes.

        While the device waits for paths, every launch queues behind this wait. Work that is not
        urgent is therefore launched between two rounds.
        """
        if self._begins_s is None:
            requests = self._requests.values()
            has_work = any(request.num_ready_rows or request.can_grow for request in requests)
            self._begins_s = self._source.ahead_until_s(requests) if has_work else math.inf
        return self._begins_s

    def note_message(self) -> None:
        """Look anew whether there is work: a message changes the requests."""
        self._begins_s = None

    def step(self) -> None:
        """Extend what can be extended, then grow every tree whose root is extended."""
        clock, has_work = self.tallies.clock, self.has_work
        began_ns = clock.begin()
        confirmed = None
        if has_work:
            confirmed = self._confirm()
            clock.end("confirm")
            self._extend_and_grow()
        self._launch_ahead()
        ended_ns = clock.end("ahead")
        if confirmed is not None:  # the target's device has these trees: nobody waits for them
            self._answer(confirmed)
            ended_ns = clock.end("answer")
        if has_work:
            self.tallies.step_s.add((ended_ns - began_ns) / 1e9)
        self._begins_s = None

    def _extend_and_grow(self) -> None:
        timer = self._timer([r for r in self._requests.values() if r.pending is not None])
        works = self.plan_extend()
        self._runner.extend(works, timer)
        for work in works:
            work.request.kv_len += work.num_rows
        clock = self.tallies.clock
        clock.end("extend")
        growing = self.plan_growth()  # while the device extends
        free = [request for request in growing if request.matcher is None]
        if free:
            self.launch_growth(free, timer)
        self._settle(works, growing)  # while it grows trees
        clock.end("grow")
        if free:
            self._read_trees(free, timer)
        if len(free) < len(growing):
            self._grow_masked([r for r in growing if r.matcher is not None])

    def _read_trees(self, grown: Sequence[DraftRequest], timer: StepTimer) -> None:
        """Wait for grown trees and send them."""
        clock = self.tallies.clock
        output = self._runner.read(timer)
        clock.end("wait")
        rows = range(len(grown))
        self._answer(settle_orders(grown, rows, output, timer))
        clock.end("answer")

    def _grow_masked(self, growing: Sequence[DraftRequest]) -> None:
        """Grow and send the trees of requests with grammars.

        The host computes a mask at every depth, so these trees are grown after the others, which
        then need not wait.
        """
        runner, timer = self._runner, self._timer(growing)
        matchers = [request.matcher for request in growing if request.matcher is not None]
        inputs = runner.pack_growth(
            growing, [request.pending_tree.order.shape for request in growing]
        )
        masks = GrowthMasks(matchers, num_places=len(inputs.seed), threads=self._matcher_threads)
        packed = runner.launch_masked_growth(inputs, masks)
        timer.device("grow")
        runner.results.start(packed)
        self.tallies.clock.end("grow")
        self._read_trees(growing, timer)

    def plan_extend(self) -> list[ExtendWork]:
        """Choose the rows to extend: first those of requests whose tree is ordered, then the
        others; in each group the oldest request first.

        A GPU extends the rows of a large step in two milliseconds, while the target computes.
        """
        ready = [
            (request, count)
            for request in self._requests.values()  # oldest first
            if (count := request.num_ready_rows)
        ]
        ready.sort(key=lambda entry: entry[0].pending is None)
        budget = self._max_batch_rows
        works = []
        for request, num_ready in ready:
            count = min(num_ready, budget, CHUNK_ROWS)
            if count and request.is_held and self._requests.reserve(request, count):
                works.append(ExtendWork(request, request.kv_len, count))
                budget -= count
        return [work for work in works if work.request.is_held]

    def plan_growth(self) -> list[DraftRequest]:
        """Return the requests whose trees can grow, with slots reserved; requests that were
        retracted for want of pages are left out.
        """
        growing = []
        for request in [request for request in self._requests.values() if request.can_grow]:
            request.follow_grammar()
            num_slots = num_scratch_slots(request.pending_tree.order.shape)
            if request.is_held and self._requests.reserve(request, num_slots):
                growing.append(request)
        return [request for request in growing if request.is_held]

    def launch_growth(self, growing: Sequence[DraftRequest], timer: StepTimer) -> None:
        """Launch the growth of the pending trees of requests; all their committed rows must have
        been extended.

        Mutates: Scratch KV slots past kv_len.
        """
        runner = self._runner
        inputs = runner.pack_growth(
            growing, [request.pending_tree.order.shape for request in growing]
        )
        post = self._source.stage_posts(growing)
        packed = runner.launch_growth(inputs)
        if post is not None:
            post(packed)
        timer.device("grow")
        runner.results.start(packed)

    def _confirm(self) -> GrownTrees | None:
        """Commit what the device did before its host had the orders; return the trees to send."""
        done = self._source.confirm(self._hear_peers)
        if done is None:
            return None
        for request in done.passed:  # else the next wait for paths would be over at once
            request.device_tree = None
        requests = done.requests
        if not requests:
            return None
        for request, num_tokens in zip(requests, done.num_tokens, strict=True):
            request.kv_len += num_tokens
            if request.features is not None:
                request.features.take(num_tokens)  # the device had them from the mailbox
        trees = settle_orders(requests, done.rows, done.output, done.timer, is_overlapped=True)
        self._count(sum(done.num_tokens), len(requests))
        for request in requests:
            self._requests.drop_unseen(request)
        return trees

    def _settle(self, works: Sequence[ExtendWork], growing: Sequence[DraftRequest]) -> None:
        """Do what can wait until a step is launched: count it, free and reserve pages."""
        if not works and not growing:
            return
        self._count(
            sum([work.num_rows for work in works]),
            len({*growing, *[work.request for work in works]}),
        )
        for request, _, _ in works:
            if request.is_held:
                self._requests.drop_unseen(request)
        for request in growing:
            shape = request.pending_tree.order.shape
            self._reserve_next(request, shape, shape.num_steps + 1)
        self._runner.bring_page_table()

    def _launch_ahead(self) -> None:
        """Launch the next extend and growth of all requests whose paths the device will get from a
        mailbox.
        """
        ready = self._source.ready_ahead(self._requests.values())
        trees = [r.device_tree for r in ready if r.device_tree is not None]
        path_width = 1 + max([tree.shape.num_steps for tree in trees], default=0)
        requests = [
            request
            for request, tree in zip(ready, trees, strict=True)
            if self._reserve_next(request, tree.following or tree.shape, path_width)
        ]
        requests = requests[: self._runner.row_buckets[-1] // path_width]
        if requests:
            self._source.launch_ahead(requests, path_width, self._timer(requests))

    def _reserve_next(self, request: DraftRequest, shape: TreeShape, path_width: int) -> bool:
        """Try to reserve slots for a path through a tree, and for the tree after that path."""
        return self._requests.try_reserve(request, path_width, num_scratch_slots(shape))

    def _answer(self, trees: GrownTrees) -> None:
        if trees.is_overlapped:
            self.num_trees["overlapped"] += len(trees.orders)
        else:
            for _, channel in trees.orders:
                self.num_trees["relayed" if channel is None else "peer"] += 1
        num_targets = self._requests.num_targets
        answer(trees, self._outbox, self._recorder, num_targets=num_targets)

    def _timer(self, requests: Sequence[DraftRequest]) -> StepTimer:
        is_on = self._recorder.is_on
        return self._recorder.step([request.request_id for request in requests] if is_on else ())

    def _count(self, num_rows: int, num_requests: int) -> None:
        self.num_steps += 1
        self.num_rows += num_rows
        self.num_request_steps += num_requests
        self.tallies.note_batch(num_rows, num_requests)
