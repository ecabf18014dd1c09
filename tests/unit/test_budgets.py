"""What a budget decides, by its own model of tokens and costs."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.config import DraftConfig
from shared.config.check import parse_shapes
from shared.ladder import LADDER, num_rungs_within, rung_within
from shared.messages import TreeShape, check_shape
from target_service.budgets.acceptance import NUM_CLASSES, Acceptance
from target_service.budgets.budget import TreeBudget
from target_service.budgets.costs import RoundCosts, RoundKind
from target_service.budgets.deal import Dealer, FixedRounds
from target_service.budgets.round_timer import StepTimes
from target_service.step_costs import StepCosts
from tests.unit.plain_dealer import PlainDealer
from tests.unit.test_budgets_simulated import CPU_FORWARD, FORWARD

NUM_RUNGS = 1 + len(LADDER)
STEPS = np.array([0, *(shape.num_steps for shape in LADDER)])
GAINS = Acceptance(LADDER, 1).gains()

Ints = NDArray[np.int64]


@st.composite
def all_costs(draw: st.DrawFn) -> RoundCosts:
    """Return costs of an H200 or of a CPU, after some rounds of any length."""
    is_gpu = draw(st.booleans())
    costs = RoundCosts(FORWARD if is_gpu else CPU_FORWARD, LADDER, is_padded=is_gpu, most_rows=512)
    for i in range(draw(st.integers(0, 4))):
        count = draw(st.integers(1, 300))
        kind = RoundKind(
            num_requests=count,
            num_rows=draw(st.integers(1, 600)),
            rung=draw(st.integers(0, len(LADDER))),
            num_trees=draw(st.integers(1, count)),
        )
        took_s = draw(st.floats(0, 0.2))
        for _ in range(draw(st.integers(1, 3))):
            costs.note_round(kind, took_s, now_s=10.0 * i)
    return costs


@st.composite
def batches(draw: st.DrawFn) -> tuple[Ints, Ints, Ints]:
    """Return classes, caps and what each request holds."""
    count = draw(st.integers(1, 40))

    def numbers(most: int) -> Ints:
        one = st.integers(0, most)
        alike = draw(st.booleans())
        some = [draw(one)] * count if alike else draw(st.lists(one, min_size=count, max_size=count))
        return np.array(some)

    return numbers(NUM_CLASSES - 1), numbers(len(LADDER)), numbers(len(LADDER))


fixed_rounds = st.builds(
    FixedRounds,
    num_requests=st.integers(0, 20),
    num_rows=st.integers(0, 100),
    num_tokens=st.floats(0, 100),
    rung=st.integers(0, len(LADDER)),
    num_trees=st.integers(0, 20),
    mixed_per_token=st.floats(0, 0.1),
)


def test_the_ladder_only_climbs() -> None:
    for lower, higher in zip(LADDER, LADDER[1:], strict=False):
        assert lower.num_steps <= higher.num_steps
        assert lower.topk <= higher.topk
        assert lower.num_draft_tokens < higher.num_draft_tokens
    for i, shape in enumerate(LADDER):
        check_shape(shape)
        assert num_rungs_within(shape) == i + 1
    assert num_rungs_within(TreeShape(num_steps=16, topk=1, num_draft_tokens=17)) == 4


def test_a_gpu_gets_ready_for_the_ladder() -> None:
    assert set(parse_shapes(DraftConfig().warm_up_trees)) == set(LADDER)


@given(batches(), all_costs(), fixed_rounds)
def test_nobody_gets_more_than_may_be_and_the_same_again(
    batch: tuple[Ints, Ints, Ints], costs: RoundCosts, fixed: FixedRounds
) -> None:
    classes, caps, held = batch
    dealer = Dealer(GAINS, costs)
    deal = dealer.deal(classes, caps, held, fixed, favour=0.02)
    assert (deal.rungs >= 0).all() and (deal.rungs <= caps).all()
    assert deal.limit == deal.rungs.max()
    again = dealer.deal(classes, caps, held, fixed, favour=0.02)
    assert (again.rungs == deal.rungs).all()


def learned_gains(seed: int) -> NDArray[np.float64]:
    """Return the gains of some draft, whose larger rungs may be no better than smaller ones."""
    rng = np.random.default_rng(seed)
    acceptance = Acceptance(LADDER, 32)
    slots = np.arange(32)
    for _ in range(200):
        rungs = rng.integers(1, NUM_RUNGS, 32)
        accepted = rng.integers(0, 1 + rng.integers(0, 7), 32)
        acceptance.note_rounds(slots, rungs, np.minimum(accepted, STEPS[rungs]))
    gains = acceptance.gains()
    if seed % 2:
        gains[:, 2] = gains[:, 1]
    return gains


@given(batches(), all_costs(), fixed_rounds, st.data())
def test_a_deal_is_that_of_one_largest_rung_after_another(
    batch: tuple[Ints, Ints, Ints], costs: RoundCosts, fixed: FixedRounds, data: st.DataObject
) -> None:
    classes, caps, held = batch
    costs.num_targets = data.draw(st.integers(1, 3))
    favour = data.draw(st.sampled_from([0.0, 0.02, 0.1]))
    gains = learned_gains(data.draw(st.integers(0, 7)))
    expected = PlainDealer(gains, costs).deal(classes, caps, held, fixed, favour=favour)
    deal = Dealer(gains, costs).deal(classes, caps, held, fixed, favour=favour)
    assert deal.rungs.tolist() == expected.rungs.tolist()
    assert deal.limit == expected.limit
    assert deal.tokens_per_s == pytest.approx(expected.tokens_per_s, rel=1e-12)


@given(batches(), all_costs(), fixed_rounds, st.floats(0, 0.1))
def test_no_shape_for_all_would_bring_more(
    batch: tuple[Ints, Ints, Ints],
    costs: RoundCosts,
    fixed: FixedRounds,
    favour: float,
) -> None:
    """By the model that it is dealt by, where larger trees are no cheaper; a shape that does not
    fit into a step is none. Of whom nothing is expected has no tree.
    """
    classes, caps, held = batch
    kinds = [[RoundKind(n, 1000, rung, n) for rung in range(1, NUM_RUNGS)] for n in range(1, 61)]
    assume((np.diff([list(map(costs.draft_s, row)) for row in kinds]) >= 0).all())
    dealer = Dealer(GAINS, costs)
    deal = dealer.deal(classes, caps, held, fixed, favour=favour)
    rate = dealer.tokens_per_s(classes, deal.rungs, fixed)
    assert rate == pytest.approx(deal.tokens_per_s)
    for rung in range(NUM_RUNGS):
        alike = np.where(classes > 0, np.minimum(caps, rung), 0)
        if costs.rows[alike].sum() + fixed.num_rows <= 512 or rung == 0:
            assert rate * (1 + favour) >= dealer.tokens_per_s(classes, alike, fixed) * (1 - 1e-9)


@given(batches(), all_costs(), st.data())
def test_more_leave_and_easier_texts_bring_no_less(
    batch: tuple[Ints, Ints, Ints], costs: RoundCosts, data: st.DataObject
) -> None:
    """But for what does not divide: a step of the ladder that only partly fits into a size."""
    classes, caps, held = batch
    dealer = Dealer(GAINS, costs)
    one = data.draw(st.integers(0, len(classes) - 1))
    rate = dealer.deal(classes, caps, held).tokens_per_s
    easier = classes.copy()
    easier[one] = data.draw(st.integers(int(classes[one]), NUM_CLASSES - 1))
    assert dealer.deal(easier, caps, held).tokens_per_s >= 0.97 * rate
    more = caps.copy()
    more[one] = data.draw(st.integers(int(caps[one]), len(LADDER)))
    assert dealer.deal(classes, more, held).tokens_per_s >= 0.97 * rate


@given(st.integers(1, 256), st.integers(0, NUM_CLASSES - 1), st.floats(0, 20e-3))
def test_a_dearer_draft_brings_no_more(count: int, easiness: int, dearer_s: float) -> None:
    rates = []
    for extra_s in (0.0, dearer_s):
        costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
        for rung in range(1, NUM_RUNGS):
            for _ in range(9):
                took_s = costs.forward_s(count) + 1e-3 + extra_s
                costs.note_round(RoundKind(count, count, rung, count), took_s, now_s=1.0)
        classes = np.full(count, easiness)
        caps = np.full(count, len(LADDER))
        rates.append(Dealer(GAINS, costs).deal(classes, caps, caps).tokens_per_s)
    assert rates[1] <= rates[0] * (1 + 1e-6)


def test_what_was_never_tried_is_no_cheaper_than_smaller_trees() -> None:
    """Small trees were slow beside the prompts of many requests, large ones of a few are not."""
    costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
    for count, rung, took_s in ((8, 0, 5e-3), (8, 5, 6e-3), (8, 6, 7e-3), (32, 3, 20e-3)):
        for _ in range(9):
            rows = count * int(costs.rows[rung])
            costs.note_round(RoundKind(count, rows, rung, count), took_s, now_s=1.0)
    of_32 = [costs.draft_s(RoundKind(32, 32, rung, 32)) for rung in range(1, NUM_RUNGS)]
    assert (np.diff(of_32[2:]) >= 0).all()


def test_on_a_cpu_smaller_trees_beside_a_deep_one_save_little() -> None:
    """They wait for its steps, and few rows more or less of a step take about the same time."""
    costs = RoundCosts(CPU_FORWARD, LADDER, is_padded=False, most_rows=512)
    whole = costs.draft_s(RoundKind(4, 4 * 6, rung=4, num_trees=4))
    mixed = costs.draft_s(RoundKind(4, 6 + 4 + 3 + 3, rung=4, num_trees=4))
    assert 0.75 * whole < mixed < 0.9 * whole
    (of_many,) = costs.drafts_s(np.array([4]), np.array([4]), 4, np.array([16]))
    assert of_many == pytest.approx(mixed)


@pytest.mark.parametrize(("num_plain", "is_believed"), [(5, False), (9, True)])
def test_many_plain_rounds_are_believed_against_what_trees_say(
    num_plain: int, *, is_believed: bool
) -> None:
    """A round of 256 trees takes less than the forward of its rows took at start-up, so that
    nothing seems to be left for the host; a few plain rounds may have been slow by chance.
    """
    costs = RoundCosts(
        StepCosts([1, 256, 1536], [4e-3, 7e-3, 33e-3]), LADDER, is_padded=True, most_rows=1536
    )
    for i in range(9):
        costs.note_round(RoundKind(256, 1536, 4, 256), 31e-3, now_s=1.0 + 0.03 * i)
    for i in range(num_plain):
        costs.note_round(RoundKind(256, 256), 10.6e-3, now_s=2.0 + 0.01 * i)
    assert (costs.round_s(RoundKind(256, 256)) == pytest.approx(10.6e-3)) == is_believed


@pytest.mark.parametrize("forward", [FORWARD, CPU_FORWARD])
def test_more_rows_than_were_measured_take_more(forward: StepCosts) -> None:
    """Whether one forward is asked for or many."""
    is_padded = forward is FORWARD
    costs = RoundCosts(forward, LADDER, is_padded=is_padded, most_rows=8192)
    rows = np.array([1, 100, 128, 129, 200, 2048, 2049, 5000])
    assert costs.forwards_s(rows).tolist() == [costs.forward_s(n) for n in rows]


def test_rows_go_where_they_bring_most() -> None:
    """Of requests that may have trees, half are easy: those have larger ones."""
    costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
    classes = np.resize([NUM_CLASSES - 5, 8], 32)
    caps = np.full(32, len(LADDER))
    rungs = Dealer(GAINS, costs).deal(classes, caps, np.zeros(32, dtype=np.int64)).rungs
    assert rungs[::2].min() > rungs[1::2].max()


def test_that_texts_are_hard_is_learned_as_soon_after_any_number_of_easy_rounds() -> None:
    acceptance, slots, rungs = Acceptance(LADDER, 1), np.array([0]), np.array([3])

    def note_rounds(count: int, accepted: int) -> None:
        for _ in range(count):
            acceptance.note_rounds(slots, rungs, np.array([accepted]))
            acceptance.recentre(slots)

    note_rounds(3000, 3)
    acceptance.begin(0)
    note_rounds(6, 0)
    assert acceptance.classes(slots)[0] < NUM_CLASSES - 10


@given(st.integers(0, 2**32), st.integers(1, 30))
@settings(max_examples=20)
def test_what_is_learned_is_near_the_truth(seed: int, count: int) -> None:
    """Of a request whose trees are chains of three: how long its paths are on average."""
    rng = np.random.default_rng(seed)
    acceptance = Acceptance(LADDER, count)
    chance = rng.uniform(0.1, 0.95, count)
    slots, rungs = np.arange(count), np.full(count, 3)
    for _ in range(300):
        drawn = rng.random((count, 3)) < chance[:, None]
        acceptance.note_rounds(slots, rungs, np.cumprod(drawn, axis=1).sum(axis=1))
    expected = 1 + chance + chance**2 + chance**3
    gains = acceptance.gains()[acceptance.classes(slots), 3]
    assert np.abs(gains - expected).mean() < 0.35
    assert np.abs(gains - expected).max() < 1.1


@pytest.mark.parametrize("rung", [3, 4])
def test_what_is_learned_of_one_rung_is_known_of_shorter_chains(rung: int) -> None:
    """All begin alike. Of each text the beginning is harder: that is no trait of the rung's."""
    rng = np.random.default_rng(1)
    num_steps = LADDER[rung - 1].num_steps
    acceptance, easy = Acceptance(LADDER, 64), np.array([0.85, 0.92] + [0.94] * (num_steps - 2))
    slots, rungs = np.arange(64), np.full(64, rung)
    for _ in range(10):
        for slot in slots.tolist():
            acceptance.begin(slot)
        for round_idx in range(75):
            chance = easy * (0.6 if round_idx < 20 else 1.0)
            drawn = rng.random((64, num_steps)) < chance
            acceptance.note_rounds(slots, rungs, np.cumprod(drawn, axis=1).sum(axis=1))
            acceptance.recentre(slots)
    gains = acceptance.gains()[acceptance.classes(slots)].mean(axis=0)
    assert np.allclose(gains[:4], 1 + np.cumsum([0, *np.cumprod(easy[:3])]), atol=0.18)


def test_what_a_bushy_tree_tries_more_is_learned_beside_others() -> None:
    rng = np.random.default_rng(1)
    acceptance, slots = Acceptance(LADDER, 64), np.arange(64)
    rungs = np.where(slots % 2 == 0, 3, 6)
    chance = np.where(rungs == 3, 0.5, 0.9)[:, None]
    before = acceptance.gains()
    for _ in range(600):
        for slot in slots.tolist():
            acceptance.begin(slot)  # else it would be the texts'
        drawn = rng.random((64, 6)) < chance
        steps = np.array([LADDER[rung - 1].num_steps for rung in rungs])
        accepted = np.minimum(np.cumprod(drawn, axis=1).sum(axis=1), steps)
        acceptance.note_rounds(slots, rungs, accepted)
    mean = acceptance.mean_class
    assert acceptance.gains()[mean, 6] > before[mean, 6] + 0.5


@pytest.mark.parametrize(("num_steps", "falls"), [(0, False), (2, False), (6, True)])
def test_a_tree_of_fewer_steps_than_its_rung_says_nothing_of_deeper_drafts(
    num_steps: int, *, falls: bool
) -> None:
    """All of two drafts are accepted: of a tree with more steps the third was refused."""
    costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
    budget = TreeBudget(costs, LADDER, 4, clock=lambda: 0.0)
    slots, ones = np.arange(4), np.ones(4, dtype=np.int64)
    before = budget.acceptance.gains()[NUM_CLASSES // 2]
    times = StepTimes(
        num_rows=64, num_requests=4, waited_rungs=6 * ones, has_prompts=False, is_clean=True
    )
    for _ in range(200):
        budget.note_step(slots, 16 * ones, 2 * ones, times, num_steps=num_steps * ones)
    after = budget.acceptance.gains()[NUM_CLASSES // 2]
    assert (after[6] - after[3] < before[6] - before[3]) == falls
    assert np.array_equal(after, before) == (num_steps == 0)


@pytest.mark.parametrize(("num_nodes", "rung"), [(4, 3), (8, 5), (1, 5)])
def test_a_round_is_one_of_the_trees_that_came(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, rung: int
) -> None:
    """Trees were ordered a round ago, smaller ones perhaps; none came: of those waited for."""
    now_s = 0.0
    noted: list[RoundKind] = []
    costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
    monkeypatch.setattr(costs, "note_round", lambda kind, *_: noted.append(kind))
    budget = TreeBudget(costs, LADDER, 4, clock=lambda: now_s)
    slots, ones = np.arange(4), np.ones(4, dtype=np.int64)
    times = StepTimes(
        num_rows=4 * num_nodes,
        num_requests=4,
        waited_rungs=5 * ones,
        has_prompts=False,
        is_clean=True,
    )
    for _ in range(3):
        now_s += 0.005
        budget.note_step(slots, num_nodes * ones, 0 * ones, times)
    want = RoundKind(num_requests=4, num_rows=4 * num_nodes, rung=rung, num_trees=4)
    assert noted == [want] * 2


def test_once_prompts_are_read_rows_have_the_price_of_a_step_without_them() -> None:
    """Within three rounds what is dealt is what it would be if there had been no prompts."""
    chosen = []
    for num_mixed in (0, 40):
        costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
        budget = TreeBudget(costs, LADDER, 32, clock=lambda: 0.0)
        slots, ones = np.arange(32), np.ones(32, dtype=np.int64)
        for slot in slots.tolist():
            budget.begin(slot)
        caps = np.full(32, len(LADDER))
        rungs = []
        for i in range(44):
            times = StepTimes(
                num_rows=128,
                num_requests=32,
                waited_rungs=3 * ones,
                has_prompts=i < num_mixed,
                is_clean=i >= 40,
            )
            budget.note_step(slots, 4 * ones, 3 * ones, times)
            if budget.is_due:
                budget.decide(slots, caps, num_coming=int(i < num_mixed))
                rungs.append(budget.rungs[slots].tolist())
        chosen.append(rungs)
    without, after = chosen
    assert after[-1] == without[-1]
    assert after[-2] != without[-1]  # beside prompts it was another deal


@pytest.mark.parametrize(
    ("largest", "shapes"),
    [
        ("9/8/40", "1/1/2,2/1/3,3/1/4,5/1/6,7/2/8,7/4/16,7/8/32,9/8/40"),
        ("7/8/32", "1/1/2,2/1/3,3/1/4,5/1/6,7/2/8,7/4/16,7/8/32"),
        ("6/8/32", "1/1/2,2/1/3,3/1/4,5/1/6,6/2/8,6/4/16,6/8/32"),
        ("5/8/32", "1/1/2,2/1/3,3/1/4,5/1/6,5/2/8,5/4/16,5/8/32"),
        ("4/2/8", "1/1/2,2/1/3,3/1/4,4/2/6,4/2/8"),
        ("4/1/5", "1/1/2,2/1/3,3/1/4"),
        ("3/4/20", "1/1/2,2/1/3,3/1/4,3/2/6,3/2/8,3/4/16"),
        ("2/8/32", "1/1/2,2/1/3,2/2/4,2/2/6"),
        ("16/1/17", "1/1/2,2/1/3,3/1/4,5/1/6"),
    ],
)
def test_rungs_are_cut_to_the_steps_of_the_largest_tree(largest: str, shapes: str) -> None:
    (most,) = parse_shapes(largest)
    count = num_rungs_within(most)
    assert [rung_within(1 + i, most) for i in range(count)] == list(parse_shapes(shapes))


def test_gains_climb_with_rungs_and_classes() -> None:
    assert (np.diff(GAINS, axis=0) > 0)[:, 1:].all()
    assert (np.diff(GAINS, axis=1) >= 0).all()
    assert (GAINS[:, 0] == 1).all()


@pytest.mark.parametrize("count", [1, 2, 8, 16, 32])
def test_what_is_expected_of_newcomers_is_what_is_decided(count: int) -> None:
    """On this CPU trees are expected to pay for one request, and for no more of them."""
    costs = RoundCosts(CPU_FORWARD, LADDER, is_padded=False, most_rows=512)
    budget = TreeBudget(costs, LADDER, 32, clock=lambda: 0.0)
    assert budget.would_rest(count) == (count > 2)  # nothing is known yet
    slots = np.arange(count)
    budget.decide(slots, np.full(count, len(LADDER)))
    assert budget.would_rest(count) == (not budget.rungs[slots].any()) == (count > 1)


@pytest.mark.parametrize("has_tree", [False, True])
def test_beside_prompts_that_would_end_trees_nobody_begins_to_have_one(*, has_tree: bool) -> None:
    """Who has trees keeps them, as far as they pay."""
    costs = RoundCosts(CPU_FORWARD, LADDER, is_padded=False, most_rows=512)
    budget = TreeBudget(costs, LADDER, 32, clock=lambda: 0.0)
    first, caps = np.array([0]), np.full(1, len(LADDER))
    for num_coming in (0, 15) if has_tree else (15, 15):
        budget.decide(first, caps, num_coming=num_coming)
    assert bool(budget.rungs[0]) == has_tree


def test_a_decision_takes_little_time() -> None:
    """0.14 ms on a server's core for 256 requests; this one may be far slower."""
    costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
    budget = TreeBudget(costs, LADDER, 256, clock=lambda: 0.0)
    slots, caps = np.arange(256), np.full(256, len(LADDER))
    took_s = []
    for _ in range(50):
        began_s = time.thread_time()
        budget.decide(slots, caps)
        took_s.append(time.thread_time() - began_s)
    assert min(took_s) < 5e-3


@pytest.mark.parametrize(
    ("missed", "num_left", "are_woken"),
    [
        ((0, 0), 100, True),
        ((0, 0), 8, False),  # hosts have work with each that wakes
        ((200, 0), 200, True),
        ((200, 0), 30, False),  # they would end before the last ones have a tree
        ((40, 0), 30, True),
        ((0, 400), 200, False),  # as many rows to compute as all have in 260 rounds
        ((15, 0), 30, True),  # which is nothing
    ],
)
def test_drafts_get_what_they_have_missed_if_that_pays(
    missed: tuple[int, int], num_left: int, *, are_woken: bool
) -> None:
    """All of 64 easy texts have rested; trees would bring half as much again."""
    costs = RoundCosts(FORWARD, LADDER, is_padded=True, most_rows=1536)
    budget = TreeBudget(costs, LADDER, 64, clock=lambda: 0.0)
    slots, caps = np.arange(64), np.full(64, len(LADDER))
    budget.decide(slots, caps)
    assert budget.rungs[slots].all()
    budget.rungs[:] = 0
    budget.decide(slots, caps, missed=np.full((64, 2), missed), num_left=np.full(64, num_left))
    assert bool(budget.rungs[slots].any()) == are_woken


def test_the_hardest_texts_of_many_do_not_say_how_easy_the_next_ones_are() -> None:
    """They are those that end last."""
    acceptance = Acceptance(LADDER, 64)
    slots, easy = np.arange(64), np.full(64, 3)
    easy[:4] = 0
    for _ in range(60):
        acceptance.note_rounds(slots, np.full(64, 3), easy)
        acceptance.recentre(slots)
    before = acceptance.mean_class
    for _ in range(40):
        acceptance.note_rounds(slots[:4], np.full(4, 3), easy[:4])
        acceptance.recentre(slots[:4])
    assert before - 2 <= acceptance.mean_class <= before
    for _ in range(600):  # it is what there is
        acceptance.note_rounds(slots[:4], np.full(4, 3), easy[:4])
        acceptance.recentre(slots[:4])
    assert acceptance.mean_class < before - 8
