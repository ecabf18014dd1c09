"""How long a round of all requests takes, where some have rounds of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from target_service.budgets.costs import RoundKind
from target_service.budgets.round_timer import RoundTimer, StepTimes, TimedRound

NUM = 16
RUNG, ROWS = 3, 4


class Steps:
    """Steps of a target, by a clock that stands still between them."""

    def __init__(self) -> None:
        self.now_s = 1.0
        self.timer = RoundTimer(NUM, lambda: self.now_s)
        for _ in range(2):  # so that every request has had a round
            self.step(0.01, plain=range(NUM))

    def step(
        self, took_s: float, plain: Sequence[int] = (), trees: Sequence[int] = ()
    ) -> TimedRound | None:
        """Let a step end that took so long, of these requests."""
        self.now_s += took_s
        slots = np.array([*plain, *trees], dtype=np.int64)
        rungs = np.array([0] * len(plain) + [RUNG] * len(trees), dtype=np.int64)
        times = StepTimes(
            num_rows=len(plain) + ROWS * len(trees),
            num_requests=NUM,
            waited_rungs=rungs,
            has_prompts=False,
            is_clean=True,
        )
        return self.timer.note_step(slots, rungs, times)


def took(timed: TimedRound | None) -> float:
    assert timed is not None
    return timed.took_s


def test_a_round_is_what_all_of_its_steps_take() -> None:
    steps = Steps()
    timed = steps.step(0.02, plain=range(NUM))
    assert took(timed) == pytest.approx(0.02)
    assert timed is not None and timed.kind == RoundKind(NUM, NUM)
    for half in (range(8), range(8, 16)) * 2:
        timed = steps.step(0.03, trees=half)
    assert took(timed) == pytest.approx(0.06)
    assert timed is not None and timed.kind == RoundKind(NUM, ROWS * NUM, RUNG, NUM)


def test_rounds_of_a_few_without_trees_are_none_of_all() -> None:
    """While the others wait for their trees these have several, in less time."""
    steps = Steps()
    steps.step(0.05, plain=range(2), trees=range(2, NUM))
    assert [steps.step(0.005, plain=range(2)) for _ in range(3)] == [None] * 3


def test_rounds_that_others_have_meanwhile_do_not_count() -> None:
    """A tree takes as long as two steps; the others have a round in each."""
    steps = Steps()
    others = range(1, NUM)
    steps.step(0.05, plain=others, trees=[0])
    assert steps.step(0.03, plain=others) is not None
    timed = steps.step(0.04, plain=others, trees=[0])
    assert took(timed) == pytest.approx(0.04)
    assert timed is not None and timed.kind == RoundKind(NUM, NUM - 1 + ROWS, RUNG, 1)


def test_the_only_round_of_the_others_counts() -> None:
    """They take turns with those that have trees."""
    steps = Steps()
    for _ in range(3):
        steps.step(0.02, plain=range(8))
        timed = steps.step(0.05, trees=range(8, NUM))
    assert took(timed) == pytest.approx(0.07)
    for _ in range(2):  # and once more in between
        steps.step(0.02, plain=range(8))
        steps.step(0.02, plain=range(8))
        timed = steps.step(0.05, trees=range(8, NUM))
    assert took(timed) == pytest.approx(0.07)
