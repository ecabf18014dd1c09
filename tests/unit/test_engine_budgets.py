"""Whatever trees a target chooses, or none, its output is the plain one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from shared.ladder import LADDER
from shared.messages import PeerTrees, SamplingParams, TreeShape
from target_service.budgets.budget import TreeBudget
from target_service.budgets.costs import RoundCosts
from target_service.budgets.shapes import BudgetedShapes, TreeShapes
from target_service.engine import TargetEngine
from target_service.nodes import AcceptedNodes, SampledTrees
from target_service.peer_rounds import PeerRounds
from target_service.request import TargetRequest
from tests.device_pair import (
    DevicePair,
    Make,
    PoisonedDevicePair,
    check,
    device_engines,
    num_rounds,
    requests_of,
)
from tests.engines import Models, fresh, make_draft, make_target, plain_of, pool_of
from tests.local_pair import LocalRequest
from tests.marks import EXHAUSTIVE
from tests.peer_pair import PeerPair, PoisonedPeerPair, close_channels
from tests.unit.test_budgets_simulated import FORWARD
from tests.unit.test_engine_device_rounds import graft_mailbox
from tests.unit.test_engine_peer_rounds import Chaos

LARGEST = TreeShape(num_steps=7, topk=8, num_draft_tokens=40)


@pytest.fixture
def make(models: Models) -> Iterator[Make]:
    """Return what makes a target with a mailbox and a draft."""
    with device_engines(models) as make:
        yield make


class HostileShapes(TreeShapes):
    """Wants another tree, or none, whenever it is asked, and of some who rest none later."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._hopes = random.Random(seed)

    def needs_no_rows(self, request: TargetRequest) -> bool:
        return self._hopes.random() < 0.2

    def of(self, request: TargetRequest, credit: PeerTrees) -> TreeShape | None:
        if not credit.adapts:
            return credit.shape
        return self._rng.choice([None, None, *LADDER, credit.shape])


class ScriptedShapes(TreeShapes):
    """Wants for all requests what it is told to want."""

    def __init__(self) -> None:
        self.wanted: TreeShape | None = LARGEST

    def of(self, request: TargetRequest, credit: PeerTrees) -> TreeShape | None:
        return self.wanted


def choose(target: TargetEngine, shapes: TreeShapes) -> None:
    """Let a target take the shapes of trees from here."""
    assert isinstance(target.source, PeerRounds)
    target.source.shapes = shapes


def tree_sizes(requests: Sequence[LocalRequest]) -> set[int]:
    return {path.num_draft_tokens for request in requests for path in request.paths}


KINDS_AND_PACES = [
    ("eagle3", True),
    ("standalone", False),
    pytest.param("eagle3", False, marks=EXHAUSTIVE),
    pytest.param("standalone", True, marks=EXHAUSTIVE),
]
"""Draft kind, and whether the target overlaps its steps."""


@pytest.mark.parametrize(("kind", "overlaps"), KINDS_AND_PACES)
def test_no_choice_changes_the_output_of_device_rounds(
    make: Make, kind: str, *, overlaps: bool
) -> None:
    target, draft, _ = make(kind, (4, 16))
    target.scheduler.overlaps_steps = overlaps
    sizes = set()
    for seed in range(2):
        requests = [replace(r, max_new_tokens=40) for r in requests_of(4, seed, LARGEST)]
        expected = plain_of(target, requests)
        choose(target, HostileShapes(seed))
        pair = PoisonedDevicePair(target, draft, adapts=True)
        if seed:  # paths of all lengths
            graft_mailbox(pair, expected, random.Random(seed))
        pair.run(requests)
        check(requests, expected)
        pair.check_idle()
        sizes |= tree_sizes(requests)
        assert pair.num_device_trees > 0
        assert {rest.is_resting for rest in pair.rests} == {False, True}
    assert sizes >= {1, 2, 3, 4, 8, 16, 32, 40}


@pytest.mark.parametrize(("kind", "overlaps"), KINDS_AND_PACES)
def test_no_choice_changes_the_output_of_peer_rounds(
    models: Models, kind: str, *, overlaps: bool
) -> None:
    pairing = models.pairing(kind)
    target, draft = make_target(pairing, feature_ring_mb=1), make_draft(pairing)
    target.scheduler.overlaps_steps = overlaps
    requests = [replace(r, max_new_tokens=40) for r in requests_of(5, 3, LARGEST)]
    requests.append(
        LocalRequest(
            prompt=[3, 1, 4],
            max_new_tokens=30,
            shape=LARGEST,
            sampling=SamplingParams(temperature=1.0, repetition_penalty=1.2, seed=5),
        )
    )
    expected = plain_of(target, requests)
    choose(target, HostileShapes(1))
    # What a step in flight has written is not to be poisoned.
    pair = (PeerPair if overlaps else PoisonedPeerPair)(target, draft, adapts=True)
    pair.run(requests)
    check(requests, expected)
    assert len(tree_sizes(requests)) > 4
    close_channels(target, draft)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "overlaps"), KINDS_AND_PACES)
def test_no_choice_and_no_mix_of_faults_changes_the_output(
    make: Make, kind: str, *, overlaps: bool
) -> None:
    target, draft, _ = make(kind, (4, 4), num_pages=1 + 90)
    target.scheduler.overlaps_steps = overlaps
    for seed in range(2):
        requests = requests_of(3, seed, LARGEST)
        expected = plain_of(target, requests)
        choose(target, HostileShapes(seed))
        pair = DevicePair(target, draft, credit_rounds=5, margin=seed % 3, adapts=True)
        for request in requests:
            pair.open(request)
        Chaos(pair, random.Random(seed)).run()
        for request, plain in zip(requests, expected, strict=True):
            assert request.output == plain.output
            assert request.finish_reason == plain.finish_reason


def test_another_shape_costs_no_round_its_tree(make: Make) -> None:
    """The draft's device knows the next shape a round ahead."""
    target, draft, _ = make("eagle")
    target.scheduler.overlaps_steps = True
    request = LocalRequest(prompt=[3, 1, 4, 1, 5], max_new_tokens=60, shape=LARGEST)
    expected = plain_of(target, [request])
    shapes = ScriptedShapes()
    choose(target, shapes)
    pair = DevicePair(target, draft, adapts=True)
    served = fresh(request)
    pair.open(served)
    while not pair.num_overlapped:
        pair.step()
    overlapped, rounds = pair.num_overlapped, len(served.paths)
    wanted = [LADDER[2], LADDER[5], LADDER[0], LADDER[4], LADDER[3]]
    for shape in wanted:
        shapes.wanted = shape
        before = len(served.paths)
        while len(served.paths) < before + 2:
            pair.step()
    num_new = len(served.paths) - rounds
    assert pair.num_overlapped - overlapped >= num_new - 2, "the device went on by itself"
    sizes = [path.num_draft_tokens for path in served.paths]
    assert {shape.num_draft_tokens for shape in wanted[:-1]} < set(sizes)
    assert 1 not in sizes[rounds:]
    pair.finish()
    check([served], expected)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_request_rests_and_comes_back(make: Make, *, overlaps: bool) -> None:
    """Its draft hears nothing meanwhile; and no round waits for the first tree afterwards."""
    target, draft, _ = make("eagle")
    target.scheduler.overlaps_steps = overlaps
    request = LocalRequest(prompt=[3, 1, 4, 1, 5], max_new_tokens=110, shape=LARGEST)
    expected = plain_of(target, [request])
    shapes = ScriptedShapes()
    choose(target, shapes)
    pair = DevicePair(target, draft, adapts=True)
    served = fresh(request)
    pair.open(served)
    while not pair.num_overlapped:
        pair.step()
    shapes.wanted = None
    while not pair.rests:
        pair.step()
    assert pair.rests[-1].is_resting
    rounds = len(served.paths)
    lengths = set()
    while len(served.paths) < rounds + 40:
        pair.step()
        lengths.add(draft.requests[served.request_id].kv_len)
    assert all(path.num_draft_tokens == 1 for path in served.paths[rounds:])
    assert len(pair.rests) == 1
    assert len(lengths) == 1, "its draft reads nothing"
    shapes.wanted = LADDER[3]
    rounds, overlapped = len(served.paths), pair.num_overlapped
    while pair.num_overlapped < overlapped + 3:
        pair.step()
    assert not pair.rests[-1].is_resting and len(pair.rests) == 2
    sizes = [path.num_draft_tokens for path in served.paths[rounds:]]
    assert sizes[-2:] == [LADDER[3].num_draft_tokens] * 2
    pair.finish()
    check([served], expected)


class TimedShapes(BudgetedShapes):
    """What a budget decides where a round takes what is said here, whatever the machine does."""

    def __init__(self, target: TargetEngine, *, tree_s: float) -> None:
        self._now_s, self._tree_s = 0.0, tree_s
        costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
        self._forward_s = costs.forward_s
        num_slots = pool_of(target).max_num_requests
        budget = TreeBudget(costs, LADDER, num_slots, clock=lambda: self._now_s)
        super().__init__(target.requests, budget)

    def note_step(
        self, trees: SampledTrees, nodes: Sequence[AcceptedNodes], *, is_clean: bool
    ) -> None:
        self._now_s += self._forward_s(sum(trees.num_nodes))
        self._now_s += self._tree_s * (max(trees.num_nodes) > 1)
        super().note_step(trees, nodes, is_clean=is_clean)


@pytest.mark.parametrize(("tree_s", "has_trees"), [(1.0, False), (0.0, True)])
def test_a_budget_decides_in_an_engine(make: Make, tree_s: float, *, has_trees: bool) -> None:
    """No tree is worth what these take, however good; or every one is, whose nodes are true."""
    target, draft, _ = make("eagle")
    target.scheduler.overlaps_steps = True
    requests = [replace(r, max_new_tokens=90) for r in requests_of(3, 0, LARGEST)]
    expected = plain_of(target, requests)
    choose(target, TimedShapes(target, tree_s=tree_s))
    pair = DevicePair(target, draft, adapts=True)
    if has_trees:
        graft_mailbox(pair, expected, random.Random(0), doubt=0.0)
    pair.run(requests)
    check(requests, expected)
    sizes = [path.num_draft_tokens for request in requests for path in request.paths]
    assert len(set(sizes)) > 1, "it has tried"
    num_trees = sum(size > 1 for size in sizes)
    if has_trees:
        assert num_trees > num_rounds(requests) // 2
    else:
        assert num_trees < num_rounds(requests) // 2


class WatchedShapes(TimedShapes):
    """Writes down when it decides."""

    def __init__(self, target: TargetEngine, events: list[str]) -> None:
        super().__init__(target, tree_s=0.0)
        decide = self._budget.decide
        self._events, self._is_learning = events, False

        def watched(*args: Any, **kwargs: Any) -> None:
            events.append("decide" if self._is_learning else "decide at once")
            decide(*args, **kwargs)

        self._budget.decide = watched  # type: ignore[method-assign]

    def learn(self) -> None:
        self._events.append("learn")
        self._is_learning = True
        super().learn()
        self._is_learning = False


@pytest.mark.parametrize("overlaps", [True, False])
def test_no_order_waits_for_a_decision(
    make: Make, monkeypatch: pytest.MonkeyPatch, *, overlaps: bool
) -> None:
    """Each is made behind the launch, the orders and the answers of its step."""
    events: list[str] = []

    def watch(owner: object, name: str) -> None:
        method = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            result = method(*args, **kwargs)
            if name == "step":
                events.append("end")
            return result

        monkeypatch.setattr(owner, name, watched)

    target, draft, _ = make("eagle")
    target.scheduler.overlaps_steps = overlaps
    source = target.source
    assert isinstance(source, PeerRounds)
    choose(target, WatchedShapes(target, events))
    watch(target.pipeline, "step")
    watch(target.runner, "compute")
    watch(source, "_put_paths")
    watch(source, "order")
    requests = [replace(r, max_new_tokens=60) for r in requests_of(3, 0, LARGEST)]
    pair = DevicePair(target, draft, adapts=True)
    pair.run(requests)
    steps = [step.split("end|")[0] for step in "|".join([*events, ""]).split("step|")[1:]]
    decided = [step for step in steps if step.endswith("learn|decide|")]
    assert sum(step.count("|decide|") for step in steps) == len(decided) > 5
    launched = [step for step in decided if "compute|" in step and "_put_paths|" in step]
    assert len(launched) > len(decided) // 2
    assert events.count("decide at once") <= len(requests)


def test_a_shape_that_is_asked_for_is_kept(make: Make) -> None:
    """A credit that does not adapt is not the budget's."""
    target, draft, _ = make("eagle")
    shape = TreeShape(num_steps=3, topk=2, num_draft_tokens=7)
    requests = requests_of(3, 0, shape)
    expected = plain_of(target, requests)
    pair = PeerPair(target, draft)
    pair.run(requests)
    check(requests, expected)
    assert not pair.rests
    assert tree_sizes(requests) <= {1, *range(2, 8)} and 7 in tree_sizes(requests)
