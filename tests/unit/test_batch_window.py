"""Trees wait for others where that saves a step, never long, and never beside other work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shared.messages import SamplingParams, StoppingParams, TargetClose, TargetOpen, TokenTree
from target_service import batch_window as batch_window_module
from target_service.batch_window import BatchWindow
from target_service.engine import TargetEngine
from target_service.request import HostTree
from target_service.step_costs import StepCosts
from tests.engines import SHAPES, Models, make_draft, make_target
from tests.local_pair import LocalRequest
from tests.peer_pair import PeerPair, batch_of, close_channels

FLAT = StepCosts([1, 64, 128, 256], [4e-3, 5e-3, 6e-3, 12e-3])
"""A GPU: weights cost 4 ms, other rows hardly anything; from 128 on, in proportion."""
STEEP = StepCosts([1, 256], [1e-3, 256e-3])
GROWTH_S = 0.010


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(batch_window_module, "time", clock)
    return clock


def experienced(clock: Clock, costs: StepCosts | None = FLAT) -> BatchWindow:
    """Return one that has seen trees take GROWTH_S."""
    batch_window = BatchWindow(costs)
    teach(batch_window, clock, 3)
    return batch_window


def teach(batch_window: BatchWindow, clock: Clock, num_trees: int) -> None:
    """Let a batch window see so many trees that take GROWTH_S."""
    for _ in range(num_trees):
        batch_window.ordered("a", 8)
        clock.pass_s(GROWTH_S)
        batch_window.arrived("a")


def test_trees_wait_somewhat_longer_than_growing_took(clock: Clock) -> None:
    batch_window = experienced(clock)
    assert batch_window.wait_s(8) == 0.0 and not batch_window.is_growing, "nobody is missing"
    batch_window.ordered("b", 8)
    assert batch_window.is_growing
    wait_s = batch_window.wait_s(8)
    assert GROWTH_S < wait_s <= 2 * GROWTH_S
    clock.pass_s(wait_s / 2)
    assert batch_window.wait_s(8) == pytest.approx(wait_s / 2, abs=1e-6)
    clock.pass_s(wait_s / 2 + 1e-6)
    assert batch_window.wait_s(8) == 0.0, "it is late: the others go"
    batch_window.arrived("b")
    assert not batch_window.is_growing


def test_a_tree_that_does_not_come_holds_the_others_up_once(clock: Clock) -> None:
    batch_window = experienced(clock)
    batch_window.ordered("lost", 8)
    clock.pass_s(1.0)
    assert batch_window.wait_s(8) == 0.0
    batch_window.ordered("b", 8)
    clock.pass_s(GROWTH_S)
    batch_window.arrived("b")
    assert batch_window.wait_s(8) < GROWTH_S, "no longer than after the newest order"
    batch_window.gave_up("lost")
    assert batch_window.wait_s(8) == 0.0
    batch_window.ordered("b", 8)
    assert batch_window.wait_s(8) <= 2 * GROWTH_S, "what was given up is no measurement"


def test_whoever_is_given_up_or_unknown_changes_nothing(clock: Clock) -> None:
    batch_window = experienced(clock)
    batch_window.ordered("b", 8)
    before = batch_window.wait_s(8)
    batch_window.arrived("who")
    batch_window.gave_up("who")
    assert batch_window.wait_s(8) == before
    batch_window.gave_up("b")
    batch_window.arrived("b")  # after all
    batch_window.ordered("c", 8)
    assert batch_window.wait_s(8) == pytest.approx(before)


@pytest.mark.parametrize(
    ("costs", "here", "coming", "waits"),
    [
        (FLAT, 8, (8,), True),
        (FLAT, 60, (30, 30), True),
        (FLAT, 128, (128,), False),
        (FLAT, 250, (8,), True),
        (STEEP, 8, (8,), False),
        (None, 8, (8,), False),
    ],
)
def test_they_wait_only_where_one_step_saves_much_of_two(
    clock: Clock, costs: StepCosts | None, here: int, coming: tuple[int, ...], *, waits: bool
) -> None:
    batch_window = experienced(clock, costs)
    for i, num_rows in enumerate(coming):
        batch_window.ordered(f"c{i}", num_rows)
    assert (batch_window.wait_s(here) > 0) == waits


def test_costs_between_and_past_what_was_measured() -> None:
    assert FLAT.of(0) == 0.0
    assert FLAT.of(1) == 4e-3
    assert FLAT.of(96) == pytest.approx(5.5e-3)
    assert FLAT.of(512) == pytest.approx(24e-3)


# --- in an engine --------------------------------------------------------------------------------


class TwoRequests:
    """Two requests of peer rounds: one tree is here, the other is still being grown."""

    def __init__(self, models: Models, clock: Clock) -> None:
        pairing = models.pairing("standalone")
        self.clock = clock
        self.target, self.draft = make_target(pairing), make_draft(pairing)
        self.target.source.window = batch_window = experienced(clock)
        self.pair = pair = PeerPair(self.target, self.draft)
        self.requests = [
            LocalRequest(prompt=[i + 1, 2], max_new_tokens=40, shape=SHAPES[2]) for i in range(2)
        ]
        for request in self.requests:
            pair.open(request)
        while min(len(request.paths) for request in self.requests) < 3:
            pair.step()
            clock.pass_s(GROWTH_S)
        while len(list(batch_window.growing)) < 2:
            pair.to_draft()
            self.draft.step()
            pair.to_target()
            clock.pass_s(1.0)
            self.step()
        teach(batch_window, clock, 60)  # what was here before counts no more
        pair.to_draft()
        assert self.draft.step() == []
        withheld: list[TokenTree] = []
        pair.edit_tree = lambda tree: tree if withheld else withheld.append(tree)
        pair.to_target()
        pair.edit_tree = lambda tree: tree
        (self.late,) = withheld

    def step(self) -> None:
        for message in self.target.step():
            self.pair.on_target(message)

    def bring_late_tree(self) -> None:
        (channel,) = self.target.channels
        self.target.submit_peer(channel, batch_of(self.late))


@pytest.fixture
def two(models: Models, clock: Clock) -> Iterator[TwoRequests]:
    two = TwoRequests(models, clock)
    yield two
    close_channels(two.target, two.draft)


def finish(two: TwoRequests) -> None:
    two.clock.pass_s(1.0)
    two.bring_late_tree()
    while any(not request.finish_reason for request in two.requests):
        two.pair.step()
        two.clock.pass_s(GROWTH_S)
    two.pair.finish()


def test_a_tree_waits_for_the_other_and_both_go_in_one_step(two: TwoRequests) -> None:
    target = two.target
    assert not target.has_work
    assert 0 < (target.has_work_in_s or 0) <= 2 * GROWTH_S
    num_steps = target.load.num_steps
    assert target.step() == [] and target.load.num_steps == num_steps, "nor does a step run it"
    two.bring_late_tree()
    assert target.has_work and target.has_work_in_s is None
    rounds = [len(request.paths) for request in two.requests]
    two.step()
    assert [len(request.paths) for request in two.requests] == [count + 1 for count in rounds]
    assert target.load.num_steps == num_steps + 1
    finish(two)


def test_after_a_while_it_goes_alone(two: TwoRequests) -> None:
    wait_s = two.target.has_work_in_s
    assert wait_s is not None
    two.clock.pass_s(wait_s + 1e-6)
    assert two.target.has_work and two.target.has_work_in_s is None
    num_rounds = sum(len(request.paths) for request in two.requests)
    two.step()
    assert sum(len(request.paths) for request in two.requests) == num_rounds + 1
    finish(two)


def prefill(two: TwoRequests) -> None:
    two.target.submit(
        TargetOpen(
            request_id="new", target_epoch=1, token_ids=(1, 2, 3), num_prompt_tokens=3,
            sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=1),
        )
    )  # fmt: skip


def miss(two: TwoRequests) -> None:
    """Order the late one's round of the root alone."""
    two.pair.miss(two.pair.requests[two.late.request_id])


def close(two: TwoRequests) -> None:
    two.target.submit(TargetClose(request_id=two.late.request_id, target_epoch=1))


def cut(two: TwoRequests) -> None:
    """The channel breaks: the tree that is here is verified all the same."""
    close_channels(two.draft)
    two.pair.to_target()


@pytest.mark.parametrize("happens", [prefill, miss, close, cut])
def test_other_work_or_nothing_to_wait_for_ends_the_wait(
    two: TwoRequests, happens: Callable[[TwoRequests], None]
) -> None:
    assert not two.target.has_work
    happens(two)
    assert two.target.has_work and two.target.has_work_in_s is None
    engine: TargetEngine = two.target
    (here,) = [r for r in engine.requests.values() if isinstance(r.queued, HostTree)]
    round_idx = here.round_idx
    engine.step()
    assert here.round_idx == round_idx + 1
