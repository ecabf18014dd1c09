"""Which rounds say what trees, and rounds without them, take: as a step's requests say it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shared.ladder import LADDER
from shared.messages import PeerTrees, TreeShape
from target_service.budgets.budget import TreeBudget
from target_service.budgets.costs import RoundCosts
from target_service.budgets.round_timer import StepTimes
from target_service.budgets.shapes import BudgetedShapes
from target_service.draft_peer import Progress
from target_service.nodes import AcceptedNodes
from target_service.request import Phase
from tests.unit.test_budgets_simulated import FORWARD

LARGEST = LADDER[-1]


class Noted(TreeBudget):
    """Keeps what it hears of the last step, and counts what it is asked."""

    times: StepTimes
    slots: list[int]
    num_steps: list[int]
    num_begun = 0
    num_decisions = 0

    def begin(self, slot: int) -> None:
        self.num_begun += 1
        super().begin(slot)

    def decide(self, *args: Any, **kwargs: Any) -> None:
        self.num_decisions += 1
        super().decide(*args, **kwargs)

    def note_step(self, *step: Any, num_steps: Any = None) -> None:
        self.slots, self.times, self.num_steps = step[0].tolist(), step[3], num_steps.tolist()
        super().note_step(*step, num_steps=num_steps)


def request(
    slot: int, progress: Progress | None, *, shape: TreeShape = LARGEST, adapts: bool = True
) -> Any:
    """Return a running request, as far as shapes look at it.

    Args:
        progress: None: no draft is attached.
    """
    credit = PeerTrees(shape=shape, draft_epoch=1, adapts=adapts)
    draft: Any = None
    if progress is not None:
        draft = SimpleNamespace(
            credit=credit,
            progress=progress,
            is_waited_for=progress is Progress.CAUGHT_UP,
            progress_in=lambda _: draft.progress,
        )
    return SimpleNamespace(
        req_idx=slot,
        round_idx=0,
        tokens=[1],
        token_limit=99,
        phase=Phase.RUNNING,
        draft=draft,
        peer_trees=credit,
        num_grown=0,
        open=SimpleNamespace(wants_features=True),
    )


def budget_of(num_slots: int) -> Noted:
    costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
    return Noted(costs, LADDER, num_slots, clock=lambda: 0.0)


def note(
    shapes: BudgetedShapes, requests: list[Any], num_nodes: list[int], *, num_on_device: int = 0
) -> None:
    """Let shapes take note of a step of these requests, which had no prompts."""
    trees = SimpleNamespace(
        requests=requests,
        req_idx=[one.req_idx for one in requests],
        num_nodes=num_nodes,
        num_on_device=num_on_device,
    )
    paths = [AcceptedNodes(10, count, [0], [7]) for count in num_nodes]
    shapes.note_step(trees, paths, is_clean=True)  # type: ignore[arg-type]


def noted(requests: list[Any], num_nodes: list[int], *, num_on_device: int = 0) -> Noted:
    """Return what a budget hears of a step of these requests, whose steps had no prompts."""
    budget = budget_of(len(requests))
    shapes = BudgetedShapes({str(one.req_idx): one for one in requests}, budget)
    note(shapes, requests, num_nodes, num_on_device=num_on_device)
    shapes.learn()
    return budget


@pytest.mark.parametrize(
    ("progress", "is_sample"),
    [
        (Progress.RESTING, True),
        (Progress.CAUGHT_UP, False),  # its last rounds
        (Progress.ASKED, False),
        (Progress.BEHIND, False),
        (None, False),  # a newcomer
    ],
)
def test_plain_rounds_are_those_of_requests_that_go_without_trees(
    progress: Progress | None, *, is_sample: bool
) -> None:
    budget = noted([request(slot, progress) for slot in range(4)], [1] * 4)
    assert budget.times.is_clean == is_sample
    assert not budget.times.has_prompts


@pytest.mark.parametrize(("num_newcomers", "is_sample"), [(1, True), (3, False)])
def test_a_few_others_do_not_matter(num_newcomers: int, *, is_sample: bool) -> None:
    resting = [request(slot, Progress.RESTING) for slot in range(16 - num_newcomers)]
    others = [request(16 - 1 - i, None) for i in range(num_newcomers)]
    assert noted(resting + others, [1] * 16).times.is_clean == is_sample


def test_a_request_that_never_has_trees_is_plain() -> None:
    plain = request(0, None)
    plain.peer_trees, plain.open.wants_features = None, False
    assert noted([plain], [1]).times.is_clean


def test_a_round_whose_tree_was_late_is_one_with_a_tree() -> None:
    """Else nobody learns what a slow draft costs."""
    budget = noted([request(0, Progress.CAUGHT_UP)], [1], num_on_device=1)
    assert budget.times.is_clean
    assert np.array_equal(budget.times.waited_rungs, [0])  # none was decided yet


@pytest.mark.parametrize(
    ("shape", "adapts", "num_steps"),
    [
        ((6, 8, 32), True, 6),
        ((5, 8, 32), True, 5),
        ((6, 4, 16), False, 6),
        ((5, 4, 16), False, 5),  # a rung but for its steps
        ((7, 4, 16), False, 7),
        ((8, 4, 16), False, 0),
        ((5, 3, 16), False, 0),
        ((3, 1, 4), False, 3),
    ],
)
def test_trees_that_clients_choose_say_what_they_can_of_rungs(
    shape: tuple[int, int, int], num_steps: int, *, adapts: bool
) -> None:
    fields = ("num_steps", "topk", "num_draft_tokens")
    chosen = TreeShape(**dict(zip(fields, shape, strict=True)))
    one = request(0, Progress.CAUGHT_UP, shape=chosen, adapts=adapts)
    assert noted([one], [chosen.num_draft_tokens]).num_steps == [num_steps]


def test_a_draft_of_releases_that_do_not_say_it_has_one_target() -> None:
    costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
    shapes = BudgetedShapes({}, TreeBudget(costs, LADDER, 1))
    heard = []
    for num_targets in (3, 0):
        shapes.note_targets(num_targets)
        heard.append(costs.num_targets)
    assert heard == [3, 1]


def test_a_request_that_gets_its_credit_between_decisions_does_not_rest_until_the_next() -> None:
    """Its first round had the root alone, and others were decided for meanwhile."""
    old, newcomer = request(0, Progress.CAUGHT_UP), request(1, Progress.BEHIND)
    credit, newcomer.draft.credit = newcomer.draft.credit, None
    requests = {str(one.req_idx): one for one in (old, newcomer)}
    shapes = BudgetedShapes(requests, budget_of(2))
    assert shapes.of(old, old.draft.credit) is not None
    newcomer.draft.credit = credit
    assert shapes.of(newcomer, credit) is not None


def test_whoever_has_a_tree_waits_for_no_decision() -> None:
    """They are made when everything is sent, for the orders after it."""
    budget = budget_of(2)
    requests = [request(slot, Progress.CAUGHT_UP) for slot in range(2)]
    shapes = BudgetedShapes({str(one.req_idx): one for one in requests}, budget)
    assert all(shapes.of(one, one.draft.credit) is not None for one in requests)
    assert budget.num_decisions == 1  # nothing was decided for either
    decided_after = []
    for round_idx in range(1, 13):
        note(shapes, requests, [4, 4])
        num_decisions = budget.num_decisions
        assert all(shapes.of(one, one.draft.credit) is not None for one in requests)
        assert budget.num_decisions == num_decisions
        shapes.learn()
        if budget.num_decisions > num_decisions:
            decided_after.append(round_idx)
    assert decided_after == [3, 7, 11]  # the first time because there are no prompts any more
    shapes.learn()  # of no step
    assert budget.num_decisions == 4


def test_nobody_waits_for_what_is_decided_for_a_newcomer() -> None:
    """It has no credit for trees yet."""
    budget = budget_of(2)
    old, newcomer = request(0, Progress.CAUGHT_UP), request(1, Progress.BEHIND)
    newcomer.draft.credit = None
    requests = {"0": old}
    shapes = BudgetedShapes(requests, budget)
    shapes.of(old, old.draft.credit)
    requests["1"] = newcomer
    note(shapes, [old, newcomer], [4, 1])
    assert budget.is_due
    shapes.of(old, old.draft.credit)
    assert budget.num_decisions == 1
    shapes.learn()
    assert budget.num_decisions == 2 and not budget.is_due


def test_another_credit_cuts_what_was_decided() -> None:
    one = request(0, Progress.CAUGHT_UP)
    shapes = BudgetedShapes({"0": one}, budget_of(1))
    decided = shapes.of(one, one.draft.credit)
    assert decided in LADDER[5:]
    for shape in (LADDER[2], LADDER[4], decided):
        credit = PeerTrees(shape=shape, draft_epoch=1, adapts=True)
        assert shapes.of(one, credit) == shapes.of(one, credit) == shape


def test_an_order_that_decides_anew_does_not_say_what_the_step_before_waited_for() -> None:
    class Settled(Noted):
        def decide(self, slots: Any, *args: Any, **kwargs: Any) -> None:
            super().decide(slots, *args, **kwargs)
            self.rungs[slots] = 1 + self.num_decisions

    costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
    budget = Settled(costs, LADDER, 2, clock=lambda: 0.0)
    old, newcomer = request(0, Progress.CAUGHT_UP), request(1, Progress.CAUGHT_UP)
    requests = {"0": old}
    shapes = BudgetedShapes(requests, budget)
    shapes.of(old, old.draft.credit)
    shapes.begin_orders()
    requests["1"] = newcomer
    assert shapes.of(newcomer, newcomer.draft.credit) == LADDER[2]
    note(shapes, [old], [3], num_on_device=1)
    shapes.learn()
    assert budget.times.waited_rungs.tolist() == [2]
    shapes.begin_orders()
    note(shapes, [old], [3], num_on_device=1)
    shapes.learn()
    assert budget.times.waited_rungs.tolist() == [3]


def test_what_a_step_was_like_is_looked_at_before_its_commit() -> None:
    """Afterwards a request may rest, or have ended."""
    budget = budget_of(2)
    waited, ended = request(0, Progress.CAUGHT_UP), request(1, Progress.CAUGHT_UP)
    requests = {"0": waited, "1": ended}
    shapes = BudgetedShapes(requests, budget)
    rungs = [LADDER.index(shapes.of(one, one.draft.credit)) + 1 for one in (waited, ended)]
    note(shapes, [waited, ended], [1, 1], num_on_device=2)
    waited.draft.progress = Progress.RESTING
    ended.phase, ended.req_idx, ended.draft.credit = Phase.WAITING, -1, None
    del requests["1"]
    shapes.learn()
    assert budget.slots == [0, 1]
    assert budget.times.waited_rungs.tolist() == rungs
    assert (budget.times.num_requests, budget.num_steps) == (2, [9, 9])


def test_a_request_that_ended_before_its_round_says_nothing() -> None:
    """It has no slot any more, and those after it in the step count."""
    budget = budget_of(3)
    requests = [request(slot, Progress.CAUGHT_UP) for slot in range(3)]
    shapes = BudgetedShapes({str(one.req_idx): one for one in requests}, budget)
    for one in requests:
        shapes.of(one, one.draft.credit)
    num_begun = budget.num_begun
    trees = SimpleNamespace(
        requests=requests, req_idx=[0, 1, 2], num_nodes=[4, 7, 8], num_on_device=3
    )
    requests[1].phase, requests[1].req_idx = Phase.WAITING, -1
    paths = [AcceptedNodes(10, count, [0], [7]) for count in trees.num_nodes]
    shapes.note_step(trees, paths, is_clean=True)  # type: ignore[arg-type]
    shapes.learn()
    assert (budget.slots, budget.times.num_rows) == ([0, 2], 12)
    assert budget.num_begun == num_begun


def test_what_was_noted_of_a_slots_last_request_says_nothing_of_the_next() -> None:
    budget = budget_of(2)
    stays, leaves = request(0, Progress.CAUGHT_UP), request(1, Progress.CAUGHT_UP)
    comes = request(1, Progress.BEHIND)
    requests = {"0": stays, "1": leaves}
    shapes = BudgetedShapes(requests, budget)
    for one in (stays, leaves):
        shapes.of(one, one.draft.credit)
    note(shapes, [stays, leaves], [4, 4])
    leaves.phase, leaves.req_idx = Phase.WAITING, -1
    requests["1"] = comes
    shape, num_begun = shapes.of(comes, comes.draft.credit), budget.num_begun
    assert num_begun == 3 and shape is not None
    shapes.learn()
    assert budget.slots == [0]
    assert budget.num_begun == num_begun
    assert shapes.of(comes, comes.draft.credit) == shape


@pytest.mark.parametrize("num_asked", [1, 8])
def test_rounds_after_many_drafts_have_caught_up_say_nothing_of_costs(num_asked: int) -> None:
    """Their drafts may still be busy; one of sixteen does not matter."""
    requests = [request(slot, Progress.CAUGHT_UP) for slot in range(16)]
    budget = budget_of(16)
    shapes = BudgetedShapes({str(one.req_idx): one for one in requests}, budget)
    for one in requests[:num_asked]:
        one.draft.progress = Progress.ASKED
    is_clean = []
    for _ in range(7):
        note(shapes, requests, [4] * 16, num_on_device=16)
        shapes.learn()
        is_clean.append(budget.times.is_clean)
        for one in requests:
            one.draft.progress = Progress.CAUGHT_UP
    assert is_clean == ([True] * 7 if num_asked == 1 else [False] * 4 + [True] * 3)


def test_of_newcomers_of_one_step_the_first_is_decided_for_and_the_others_join_it() -> None:
    """Until the next decision, which is for all of them and made at the end of the step."""
    budget = budget_of(8)
    requests: dict[str, Any] = {}
    shapes = BudgetedShapes(requests, budget)
    note(shapes, [], [])
    shapes.begin_orders()
    wanted = []
    for slot in range(4):
        one = requests[str(slot)] = request(slot, Progress.BEHIND)
        wanted.append(shapes.of(one, one.draft.credit))
    assert budget.num_decisions == 1 and len(set(wanted)) == 1 and wanted[0] is not None
    shapes.learn()
    assert budget.num_decisions == 2
    shapes.begin_orders()
    one = requests["4"] = request(4, Progress.BEHIND)
    assert shapes.of(one, one.draft.credit) is not None and budget.num_decisions == 3


@pytest.mark.parametrize(
    ("num_coming", "num_rows", "are_resting"), [(8, 60, False), (1, 20_000, False), (8, 2500, True)]
)
def test_requests_rest_beside_prompts_of_many_that_take_long(
    num_coming: int, num_rows: int, *, are_resting: bool
) -> None:
    running = [request(slot, Progress.CAUGHT_UP) for slot in range(8)]
    coming = [request(8 + i, None) for i in range(num_coming)]
    for one in coming:
        one.phase, one.tokens, one.committed_len = Phase.PREFILL, [0] * num_rows, 0
    requests = {str(one.req_idx): one for one in [*running, *coming]}
    shapes = BudgetedShapes(requests, budget_of(16))
    wanted = {shapes.of(one, one.draft.credit) for one in running}
    assert (wanted == {None}) == are_resting
    for one in coming:
        one.committed_len = num_rows - 10
    for _ in range(8):  # a rest is one of some rounds, and a decision good for some
        note(shapes, running, [1] * 8)
        shapes.learn()
    assert all(shapes.of(one, one.draft.credit) for one in running)
