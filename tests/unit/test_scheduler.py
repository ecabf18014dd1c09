"""Admission, row budgets, fairness and retraction, without a model."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.kv.layout import KVLayout
from shared.kv.pool import KVPool
from shared.messages import (
    MAX_TREE_NODES,
    SamplingParams,
    StoppingParams,
    TargetOpen,
    TokenTree,
)
from target_service.feature_log import FeatureLog
from target_service.prompt_budget import PromptBudget
from target_service.request import ROOT_ONLY, Phase, TargetRequest
from target_service.scheduler import CHAIN_SHARE, Scheduler, StepPlan
from target_service.step_costs import StepCosts


class World:
    """A scheduler, and an engine that commits at once whatever was planned."""

    def __init__(
        self,
        *,
        num_pages: int = 100,
        page_size: int = 4,
        max_num_requests: int = 8,
        max_batch_rows: int = 64,
        chunk_len: int = 16,
        costs: StepCosts | None = None,
        window: int = 0,
    ) -> None:
        self.pool = KVPool(
            layout=KVLayout.uniform(1, 1, 1), num_pages=num_pages,
            page_size=page_size,
            max_num_requests=max_num_requests, max_pages_per_request=max(num_pages, 300),
            dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        self.now = 0.0
        self.window = window
        self.max_batch_rows = max_batch_rows
        self.chunk_len = chunk_len
        self.scheduler = Scheduler(
            self.pool,
            max_batch_rows=max_batch_rows,
            prefill_chunk_len=chunk_len,
            prompt_budget=None if costs is None else PromptBudget(costs, clock=lambda: self.now),
            window=window,
        )
        self.order = itertools.count()

    def open(self, name: str, num_tokens: int, *, priority: int = 0) -> TargetRequest:
        message = TargetOpen(
            request_id=name, target_epoch=1, token_ids=tuple(range(num_tokens)),
            num_prompt_tokens=num_tokens, sampling=SamplingParams(),
            stopping=StoppingParams(max_new_tokens=10), priority=priority,
        )  # fmt: skip
        request = TargetRequest(
            open=message, admission_idx=next(self.order), opened_s=self.now,
            tokens=list(message.token_ids),
        )  # fmt: skip
        self.scheduler.enqueue(request)
        return request

    def queue(self, request: TargetRequest, num_nodes: int) -> None:
        tree = TokenTree(
            request_id=request.request_id, target_epoch=1, draft_epoch=1, round_idx=1,
            seq_len=request.committed_len, token_ids=(0,) * num_nodes,
            parent_index=(-1,) + (0,) * (num_nodes - 1),
        )  # fmt: skip
        request.queued = request.host_tree(tree, "relayed") if num_nodes > 1 else ROOT_ONLY
        request.queue_idx = next(self.order)

    def step(self, num_accepted: int = 1) -> StepPlan:
        """Plan, check the plan, commit it."""
        plan = self.scheduler.plan()
        self.check(plan)
        for work in plan.prefills:
            work.request.launched_len = work.request.committed_len = work.stop
            if work.is_last:
                work.request.phase = Phase.RUNNING
                work.request.tokens.append(0)
        for request in plan.verifies:
            assert request.queued is not None
            count = min(num_accepted, request.queued.num_rows)
            request.tokens.extend([0] * count)
            request.committed_len += count
            request.launched_len = request.committed_len
            request.queued = None
        for replay in plan.replays:
            assert replay.request.features is not None
            replay.request.features.next = replay.stop
        return plan

    def check(self, plan: StepPlan) -> None:
        self.pool.check_integrity()
        sizes = [request.next_num_rows for request in plan.verifies]
        chains = [w.stop - w.start for w in (*plan.prefills, *plan.replays)]
        assert all(1 <= length <= self.chunk_len for length in chains)
        total = sum(sizes) + sum(chains)
        assert total <= max(self.max_batch_rows, sizes[0] if sizes else 0)
        gone = {id(r) for r in plan.retracted}
        for request, size in zip(plan.verifies, sizes, strict=True):
            assert id(request) not in gone
            self.check_rows(request, request.committed_len, request.committed_len + size)
        for work in plan.prefills:
            assert id(work.request) not in gone
            assert work.start == work.request.committed_len
            self.check_rows(work.request, work.start, work.stop)
        for request in plan.retracted:
            assert request.req_idx == -1 and request.phase is Phase.WAITING

    def num_reserved(self, request: TargetRequest) -> int:
        return self.pool.reserved_len(request.req_idx)

    def check_rows(self, request: TargetRequest, start: int, stop: int) -> None:
        """Check that all that rows write and see has pages, and nothing before a window."""
        first_seen = max(0, start + 1 - self.window) if self.window else 0
        assert self.pool.holds(request.req_idx, first_seen, stop)
        if first_seen >= self.pool.page_size:
            unseen = (first_seen // self.pool.page_size) * self.pool.page_size
            assert not self.pool.holds(request.req_idx, unseen - 1, stop), "a page that none sees"


def run_to_the_end(world: World, lengths: list[int], num_tokens: int, seed: int) -> int:
    """Serve requests as an orchestrator would, re-opening what is retracted; count retractions."""
    rng = random.Random(seed)
    names = [f"r{i}" for i in range(len(lengths))]
    goal = {name: length + num_tokens for name, length in zip(names, lengths, strict=True)}
    live = {
        name: world.open(name, length, priority=rng.randrange(2))
        for name, length in zip(names, lengths, strict=True)
    }
    num_retracted = 0
    for _ in range(5000):
        if not live:
            world.pool.check_integrity()
            assert world.pool.num_free_pages == world.pool.num_pages
            return num_retracted
        for request in live.values():
            if request.phase is Phase.RUNNING and request.queued is None and rng.random() < 0.8:
                world.queue(request, rng.choice([1, 2, 8, 64]))
        before = {name: len(request.tokens) for name, request in live.items()}
        plan = world.step(rng.randrange(1, 7))
        for name in rng.sample(names, rng.randrange(len(names) + 1)):
            world.scheduler.reserve_early([(name, rng.choice([2, 8, 64]))])
        for request in plan.retracted:
            num_retracted += 1
            name = request.request_id
            assert len(request.tokens) == before[name], "a retracted request lost or won tokens"
            live[name] = world.open(name, len(request.tokens))
        for name, request in list(live.items()):
            if len(request.tokens) >= goal[name]:
                world.scheduler.remove(request)
                del live[name]
    raise AssertionError(f"stuck: {live}")


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    page_size=st.sampled_from([1, 3, 16]),
    room=st.integers(0, 60),
    max_batch_rows=st.sampled_from([1, 7, 64, 500]),
    seed=st.integers(0, 1000),
    window=st.sampled_from([0, 1, 7, 40]),
)
def test_everyone_finishes_in_any_pool_that_holds_one(
    lengths: list[int], page_size: int, room: int, max_batch_rows: int, seed: int, window: int
) -> None:
    """Whatever rows see: what is behind a window is freed, and nothing before its time."""
    num_tokens = 12
    needed = max(lengths) + num_tokens + 7 + MAX_TREE_NODES
    world = World(
        num_pages=1 + -(-(needed + room) // page_size), page_size=page_size,
        max_num_requests=3, max_batch_rows=max_batch_rows, chunk_len=16, window=window,
    )  # fmt: skip
    run_to_the_end(world, lengths, num_tokens, seed)


def test_tight_pools_do_retract() -> None:
    """The property above is about retraction: see that it happens, and in which order."""
    world = World(num_pages=48, page_size=4, max_num_requests=4)
    assert run_to_the_end(world, [20, 20, 20, 20], 60, seed=1) > 3


def test_the_newest_is_retracted_for_an_older_one() -> None:
    world = World(num_pages=47, page_size=4, max_batch_rows=128)
    old, new = world.open("old", 20), world.open("new", 20)
    plan = world.step()
    assert plan.admitted == [old, new]
    world.step()
    world.queue(new, 64)
    world.queue(old, 64)
    assert world.step().verifies == [new, old]
    old.tokens.extend([0] * 36)
    old.launched_len += 36  # old needs 120 slots, new holds 84 of the 184
    world.queue(new, 1)
    world.queue(old, 64)
    plan = world.step()
    assert (plan.verifies, plan.retracted) == ([old], [new])
    assert plan.prefills == []
    assert world.scheduler.num_running == 1


def test_admission_waits_for_a_prompt_and_a_whole_round() -> None:
    world = World(num_pages=1 + (40 + 64 + 16 + 64) // 4, page_size=4)
    first, second, third = world.open("1", 40), world.open("2", 17), world.open("3", 1)
    plan = world.step()
    assert plan.admitted == [first], "17 tokens and a round are one page too many; no overtaking"
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (1, 2)
    world.scheduler.remove(second)  # cancelled while it waits
    assert world.step().admitted == [third]
    world.scheduler.remove(first)
    world.scheduler.remove(third)
    assert world.pool.num_free_pages == world.pool.num_pages and not world.scheduler.has_work


def test_admission_waits_for_no_more_than_a_window_and_its_chunks() -> None:
    """Of a request whose rows no draft asks for; what it will still reserve is set aside."""
    most = 40 + 2 * (16 + 4) + MAX_TREE_NODES
    world = World(num_pages=1 + 2 * most // 4, page_size=4, window=40)
    first, second, third = (world.open(str(i), 1000) for i in range(3))
    assert world.step().admitted == [first, second]
    while first.phase is second.phase is Phase.PREFILL:
        assert third.phase is Phase.WAITING
        assert not world.step().retracted
    for _ in range(100):
        assert not world.step().retracted
    assert third.phase is Phase.RUNNING, "a prompt that is read holds its window's pages"
    world.scheduler.remove(third)
    world.scheduler.remove(second)
    reading = world.open("reading", 200)
    reading.features = FeatureLog(retain_rows=8)
    assert world.step().admitted == [], "its pages are kept: it needs those of 264 tokens"
    world.scheduler.remove(first)
    assert world.step().admitted == [reading]


def test_rows_of_the_page_table_limit_admission() -> None:
    world = World(max_num_requests=2)
    requests = [world.open(str(i), 3) for i in range(3)]
    assert world.step().admitted == requests[:2]
    world.scheduler.remove(requests[0])
    assert world.scheduler.has_work
    assert world.step().admitted == [requests[2]]


def test_priority_then_order() -> None:
    world = World(max_num_requests=1)
    names = {"a": 0, "b": 5, "c": 5, "d": -1, "e": 7}
    requests = {name: world.open(name, 2, priority=p) for name, p in names.items()}
    admitted = []
    for _ in names:
        [request] = world.step().admitted
        admitted.append(request.request_id)
        world.scheduler.remove(requests[request.request_id])
    assert admitted == ["e", "b", "c", "a", "d"]


def test_long_prompts_come_in_chunks() -> None:
    world = World(max_batch_rows=20, chunk_len=16)
    request = world.open("r", 37)
    spans = []
    while request.phase is not Phase.RUNNING:
        [work] = world.step().prefills
        spans.append((work.start, work.stop))
    assert spans == [(0, 16), (16, 32), (32, 37)]
    assert not world.scheduler.has_work


def running(world: World, names: str, num_tokens: int = 4) -> list[TargetRequest]:
    requests = [world.open(name, num_tokens) for name in names]
    while any(request.phase is not Phase.RUNNING for request in requests):
        world.step()
    return requests


def test_saturating_rounds_take_turns() -> None:
    """More rows wait than a step takes; whoever is served asks again at once."""
    world = World(num_pages=2000, max_batch_rows=64)
    requests = running(world, "abcd")
    num_rounds = dict.fromkeys("abcd", 0)
    for _ in range(40):
        for request in requests:
            if request.queued is None:
                world.queue(request, 40)
        for request in world.step().verifies:
            num_rounds[request.request_id] += 1
    assert set(num_rounds.values()) == {10}


def test_saturating_rounds_leave_rows_for_prefills_and_replays() -> None:
    world = World(num_pages=2000, max_batch_rows=64, chunk_len=16)
    requests = running(world, "abcd")
    listener = requests[0]
    listener.features = FeatureLog(retain_rows=0, start=4, end=4)

    def saturate() -> StepPlan:
        for request in requests:
            if request.queued is None:
                world.queue(request, 16)
        return world.step()

    assert len(saturate().verifies) == 4, "nobody else needs the rows"
    late = world.open("late", 40)
    num_steps = 0
    while late.phase is not Phase.RUNNING:
        assert len(saturate().verifies) == 3
        num_steps += 1
    assert num_steps == 3
    listener.features.subscribe(0)
    plan = saturate()
    assert [(w.start, w.stop) for w in plan.replays] == [(0, 4)]
    assert world.max_batch_rows // CHAIN_SHARE == 16


# Weights are most of a small step, then cost grows with the rows.
COSTS = StepCosts([1, 8, 32, 64, 128, 256], [4.0, 4.1, 4.4, 5.0, 7.0, 14.0])


def prompt_rows(plan: StepPlan) -> dict[str, int]:
    return {work.request.request_id: work.stop - work.start for work in plan.prefills}


def test_an_idle_target_reads_prompts_at_once() -> None:
    world = World(num_pages=2000, max_batch_rows=1024, chunk_len=1024, costs=COSTS)
    world.open("a", 900)
    assert prompt_rows(world.step()) == {"a": 900}


@pytest.mark.parametrize(("num_nodes", "expected"), [(1, 128 - 2), (8, 128 - 16), (64, 256 - 128)])
def test_prompts_do_not_make_a_step_of_trees_longer_than_twice(
    num_nodes: int, expected: int
) -> None:
    world = World(num_pages=2000, max_batch_rows=1024, chunk_len=1024, costs=COSTS)
    requests = running(world, "ab")
    late = world.open("late", 900)
    while late.phase is not Phase.RUNNING:
        for request in requests:
            world.queue(request, num_nodes)
        left = 900 - late.launched_len
        assert prompt_rows(world.step()) == {"late": min(expected, left)}
    assert COSTS.of(2 * num_nodes + expected) <= 2 * COSTS.of(2 * num_nodes)


def test_whoever_waits_for_a_tree_counts_as_well() -> None:
    world = World(num_pages=2000, max_batch_rows=1024, chunk_len=1024, costs=COSTS)
    running(world, "ab")
    world.open("late", 900)
    assert prompt_rows(world.step()) == {"late": 128 - 2}


def test_the_longer_a_prompt_waits_the_longer_a_step_may_take() -> None:
    world = World(num_pages=4000, max_batch_rows=1024, chunk_len=1024, costs=COSTS)
    [stream] = running(world, "s")
    world.open("late", 2000)
    rows = []
    for waited_s in (0.0, 0.25, 0.3, 5.0):
        world.now = waited_s
        world.queue(stream, 1)
        rows.append(prompt_rows(world.step())["late"])
    assert rows == [127, 255, 255, 255]


@pytest.mark.parametrize(("num_prompts", "is_longer"), [(6, False), (60, True)])
def test_a_step_is_longer_the_longer_all_prompts_will_wait(
    num_prompts: int, *, is_longer: bool
) -> None:
    """Those that are read within 0.1 s make nobody wait twice as long; many are read faster."""
    costs = StepCosts([1, 128, 256, 512, 1024], [4e-3, 5e-3, 7e-3, 12e-3, 21e-3])
    budget = PromptBudget(costs, clock=lambda: 100.0)
    num_rows = budget.num_rows(4, 256 * num_prompts, 100.0, is_crowded=True)
    assert (costs.of(4 + num_rows) > 2 * costs.of(4)) == is_longer


def test_steps_with_one_of_several_prompts_are_shorter() -> None:
    """There are many of them, one after the other."""
    costs = StepCosts([1, 128, 256, 512, 1024], [4e-3, 5e-3, 7e-3, 12e-3, 21e-3])
    budget = PromptBudget(costs, clock=lambda: 100.0)
    assert budget.num_rows(4, 512, 100.0) == 256 - 4
    assert budget.num_rows(4, 512, 100.0, is_crowded=True) == 128 - 4


def test_what_a_round_takes_beside_its_forward_leaves_room_for_prompts() -> None:
    """Waiting for trees counts in the time from token to token, with prompts and without."""
    now = 0.0
    budget = PromptBudget(COSTS, clock=lambda: now)
    assert budget.num_rows(2, 999, now) == 128 - 2
    for _ in range(100):
        now += COSTS.of(2) + 3.0
        budget.note_step(2)
    seen = budget.num_rows(64, 999, now)
    assert seen == 128 - 64  # 2 * (5 + 3) - 3 = 13 < 14
    for _ in range(100):
        now += COSTS.of(64) + 4.5
        budget.note_step(64)
    assert budget.num_rows(64, 999, now) >= 256 - 64  # 2 * (5 + 4.5) - 4.5 = 14.5
    now += 100.0  # nobody was there
    budget.note_step(64)
    now += 30.0
    budget.note_step(256, num_chain_rows=254)
    for _ in range(30):
        now += COSTS.of(256) + 4.5
        budget.note_step(256, num_chain_rows=254)
    assert 256 - 64 <= budget.num_rows(64, 999, now) < 256


def test_what_a_prompt_takes_beyond_the_table_is_learned() -> None:
    """A draft of the same GPU reads it, too."""
    now = 0.0
    budget = PromptBudget(COSTS, clock=lambda: now)
    assert budget.num_rows(2, 999, now) == 128 - 2
    for _ in range(30):
        now += COSTS.of(128) + 6.0
        budget.note_step(128, num_chain_rows=126)
    assert budget.num_rows(2, 999, now) < 128 - 2


def test_a_few_rows_do_not_cost_a_size_more() -> None:
    budget = PromptBudget(StepCosts([8, 128, 256], [4.0, 5.0, 7.0]), clock=lambda: 0.0)
    assert budget.num_rows(8, 500, 0.0) == 256 - 8
    assert budget.num_rows(8, 130, 0.0) == 128 - 8
    assert budget.num_rows(8, 60, 0.0) == 128 - 8


def test_short_prompts_pass_and_the_oldest_gets_on() -> None:
    world = World(num_pages=4000, max_batch_rows=1024, chunk_len=1024, costs=COSTS)
    [stream] = running(world, "s")
    world.open("long", 2500)
    world.step()
    for i in range(10):
        short = world.open(f"short {i}", 90)
        world.queue(stream, 1)
        assert prompt_rows(world.step()) == {f"short {i}": 90, "long": 127 - 90}
        world.scheduler.remove(short)
    world.open("another", 900)
    world.queue(stream, 1)
    assert prompt_rows(world.step()) == {"another": 96, "long": 127 // CHAIN_SHARE}


def test_prompts_get_on_beside_trees_of_any_size() -> None:
    """Where twice a step's time is enough for no more rows."""
    costs = StepCosts([1, 2, 4], [1.0, 100.0, 10000.0])
    world = World(num_pages=2000, max_batch_rows=256, chunk_len=256, costs=costs)
    [stream] = running(world, "s")
    late = world.open("late", 200)
    for _ in range(20):
        world.queue(stream, 2)
        world.step()
    assert late.phase is Phase.RUNNING


def test_a_tree_larger_than_the_budget_runs_alone() -> None:
    world = World(max_batch_rows=8)
    first, second = running(world, "ab")
    world.queue(first, 64)
    world.queue(second, 1)
    assert world.step().verifies == [first]
    assert world.step().verifies == [second]


@pytest.mark.parametrize(("max_batch_rows", "num_nodes"), [(64, 64), (16, 16), (8, 64), (2, 1)])
def test_trees_that_fill_steps_alone_take_turns_with_prompts(
    max_batch_rows: int, num_nodes: int
) -> None:
    world = World(num_pages=2000, max_batch_rows=max_batch_rows)
    requests = running(world, "abc")
    late = world.open("late", 20)
    num_rounds = dict.fromkeys("abc", 0)
    for _ in range(60):
        for request in requests:
            if request.queued is None:
                world.queue(request, num_nodes)
        for request in world.step().verifies:
            num_rounds[request.request_id] += 1
    assert late.phase is Phase.RUNNING
    assert min(num_rounds.values()) >= 15


def test_pages_are_reserved_ahead_only_if_they_are_free() -> None:
    world = World(num_pages=1 + 20, page_size=4)
    old, new = running(world, "ab", num_tokens=8)
    reserve_early = world.scheduler.reserve_early
    reserve_early([("a", 60)])
    assert world.num_reserved(old) == 68
    reserve_early([("b", 8)])
    assert world.pool.num_free_pages == 1, "one page is too few, and nobody goes for it"
    reserve_early([("b", 4)])
    assert world.num_reserved(new) == 12 and world.pool.num_free_pages == 0
    reserve_early([("gone", 4)])
    world.queue(new, 8)
    world.queue(old, 60)
    plan = world.step()
    assert (plan.verifies, plan.retracted) == ([old], [new]), "as without it"


@pytest.mark.parametrize("phase", ["waiting", "prefill", "running", "queued"])
def test_removal_in_any_phase_frees_everything(phase: str) -> None:
    world = World(max_batch_rows=16)
    request = world.open("r", 40)
    if phase != "waiting":
        world.step()
    if phase in ("running", "queued"):
        while request.phase is not Phase.RUNNING:
            world.step()
    if phase == "queued":
        world.queue(request, 64)
    world.scheduler.remove(request)
    assert not world.scheduler.has_work
    assert world.step().is_empty
    assert world.pool.num_free_pages == world.pool.num_pages
    world.pool.check_integrity()
