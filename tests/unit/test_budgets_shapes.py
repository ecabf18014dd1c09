"""Which rounds say what trees, and rounds without them, take: as a step's requests say it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shared.ladder import LADDER
from shared.messages import PeerTrees, TreeShape
from target_service.budgets.budget import StepTimes, TreeBudget
from target_service.budgets.costs import RoundCosts
from target_service.budgets.shapes import BudgetedShapes
from target_service.draft_peer import Progress
from target_service.nodes import AcceptedNodes
from target_service.request import Phase
from tests.unit.test_budgets_simulated import FORWARD

LARGEST = LADDER[-1]


class Noted(TreeBudget):
    """Keeps what it hears of the last step."""

    times: StepTimes
    num_steps: list[int]

    def note_step(self, *step: Any, num_steps: Any = None) -> None:
        self.times, self.num_steps = step[3], num_steps.tolist()


def request(
    slot: int, progress: Progress | None, *, shape: TreeShape = LARGEST, adapts: bool = True
) -> Any:
    """Return a running request, as far as shapes look at it.

    Args:
        progress: None: no draft is attached.
    """
    credit = PeerTrees(shape=shape, draft_epoch=1, adapts=adapts)
    draft = None
    if progress is not None:
        draft = SimpleNamespace(
            credit=credit, progress=progress, is_waited_for=progress is Progress.CAUGHT_UP
        )
    return SimpleNamespace(
        req_idx=slot,
        phase=Phase.RUNNING,
        draft=draft,
        peer_trees=credit,
        num_grown=0,
        open=SimpleNamespace(wants_features=True),
    )


def noted(requests: list[Any], num_nodes: list[int], *, num_on_device: int = 0) -> Noted:
    """Return what a budget hears of a step of these requests, whose steps had no prompts."""
    costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
    budget = Noted(costs, LADDER, len(requests), clock=lambda: 0.0)
    shapes = BudgetedShapes({str(one.req_idx): one for one in requests}, budget)
    trees = SimpleNamespace(
        requests=requests,
        req_idx=[one.req_idx for one in requests],
        num_nodes=num_nodes,
        num_on_device=num_on_device,
    )
    paths = [AcceptedNodes(10, count, [0], [7]) for count in num_nodes]
    shapes.note_step(trees, paths, is_clean=True)  # type: ignore[arg-type]
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
        ((7, 4, 16), False, 0),
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
    costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
    old, newcomer = request(0, Progress.CAUGHT_UP), request(1, Progress.BEHIND)
    credit, newcomer.draft.credit = newcomer.draft.credit, None
    requests = {str(one.req_idx): one for one in (old, newcomer)}
    shapes = BudgetedShapes(requests, TreeBudget(costs, LADDER, 2, clock=lambda: 0.0))
    assert shapes.of(old, old.draft.credit) is not None
    newcomer.draft.credit = credit
    assert shapes.of(newcomer, credit) is not None
