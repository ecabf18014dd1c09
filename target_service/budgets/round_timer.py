"""Measure how long a round of all running requests takes.

A round may be spread over several steps, if requests take turns in them. And requests without trees
may have several rounds while others wait for trees, as on a CPU: then a round of all has one of
these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from target_service.budgets.costs import RoundKind

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# In a round without trees that is learned from, so many of the running requests had one: where
# others wait for trees, the few without trees have rounds of their own, which take less. And a step
# without trees is one of further rounds if so many of its requests had another one.
_LEAST_PART = 7 / 8
# Steps that are remembered: more than requests without trees have while a tree grows.
_MOST_STEPS = 32


class StepTimes(NamedTuple):
    """What the time of a step depends on.

    Args:
        num_rows: Rows of trees in the step.
        num_requests: Running requests, in this step or not.
        waited_rungs: [B], rung of the tree that each request waited for, also if it did not come;
            0: the request waited for no tree.
        has_prompts: The step had rows of prompts as well.
        is_clean: The time may be learned from: no rows of prompts, and few drafts catch up.
    """

    num_rows: int
    num_requests: int
    waited_rungs: Ints
    has_prompts: bool
    is_clean: bool


class _Step(NamedTuple):
    """A step that has ended.

    Args:
        slots: Of its requests.
        has_trees: Some of its requests had trees, or waited for some.
    """

    slots: Ints
    has_trees: bool
    took_s: float
    ended_s: float


class TimedRound(NamedTuple):
    """A round of all requests.

    Args:
        kind: What its time depends on.
        took_s: From the end of the round before to the end of this round, without further rounds of
            requests that have no trees.
        ended_s: When the round ended, monotonic.
    """

    kind: RoundKind
    took_s: float
    ended_s: float


class RoundTimer:
    """Times rounds by when the rounds of each request ended.

    Args:
        num_slots: Most requests at once.
        clock: Returns when the last step ended, monotonic, seconds.
    """

    def __init__(self, num_slots: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        # By slot: when the last round ended, and the rows and the rung of its tree.
        self._ended_s = np.zeros(num_slots)
        self._num_rows = np.zeros(num_slots)
        self._rungs: Ints = np.zeros(num_slots, dtype=np.int64)
        self._was_clean = False
        self._steps: deque[_Step] = deque(maxlen=_MOST_STEPS)

    def begin(self, slot: int) -> None:
        """Note that a new request holds a slot: no round of it has ended."""
        self._ended_s[slot] = 0.0

    def note_step(self, slots: Ints, rungs: Ints, times: StepTimes) -> TimedRound | None:
        """Note that a step has ended now.

        Args:
            slots: [B], slots of the requests that had a round in the step.
            rungs: [B], rungs of the trees that these requests had, or waited for.
            times: What the time of the step depends on.
        Returns: The round that ended with the step; None: its time must not be learned from.
        """
        now_s = self._clock()
        ended_s = self._ended_s.take(slots).tolist()
        self._ended_s[slots] = now_s
        self._num_rows[slots] = times.num_rows / max(len(slots), 1)
        self._rungs[slots] = rungs
        before_s = self._steps[-1].ended_s if self._steps else 0.0
        with_trees = [s for s, rung in zip(ended_s, rungs.tolist(), strict=True) if rung]
        self._steps.append(_Step(slots, len(with_trees) > 0, now_s - before_s, now_s))
        is_clean, self._was_clean = times.is_clean and self._was_clean, times.is_clean
        if not is_clean or not len(slots) or not all(ended_s):
            return None
        # Rounds of requests without trees may be shorter: they do not wait for trees.
        began_s = _median(with_trees or ended_s)
        ran = (self._ended_s > began_s).nonzero()[0]
        kind = self._kind_of(ran, max(times.num_requests, len(slots)))
        if kind.rung and not with_trees:
            return None
        if not kind.rung and len(ran) < _LEAST_PART * kind.num_requests:
            return None
        took_s = now_s - began_s
        if kind.rung:
            took_s -= self._further_rounds_s(began_s)
        return TimedRound(kind, took_s, now_s)

    def _further_rounds_s(self, began_s: float) -> float:
        """Return how long steps without trees took whose requests have had a round since then.

        Args:
            began_s: When the round of those with trees began.
        """
        since = list(takewhile(lambda step: step.ended_s > began_s, reversed(self._steps)))
        if all([step.has_trees for step in since]):
            return 0.0
        had_one = np.zeros(len(self._ended_s), dtype=bool)
        further_s = 0.0
        for step in since:
            is_plain = not step.has_trees and len(step.slots) > 0
            if is_plain and had_one[step.slots].mean() >= _LEAST_PART:
                further_s += step.took_s
            had_one[step.slots] = True
        return further_s

    def _kind_of(self, ran: Ints, num_requests: int) -> RoundKind:
        """Return the kind of a round of all requests, from those that had a round since it began.

        Requests may take turns in steps. Requests without a round are taken to be like the others.

        Args:
            ran: Slots of the requests that had one.
        """
        rungs = self._rungs.take(ran).tolist()
        num_rows = float(np.add.reduce(self._num_rows.take(ran)))
        scale = num_requests / len(ran)
        return RoundKind(
            num_requests=num_requests,
            num_rows=round(num_rows * scale),
            rung=max(rungs),
            num_trees=round((len(rungs) - rungs.count(0)) * scale),
        )


def _median(values: list[float]) -> float:
    """Return the median. For a few hundred values np.median takes several times as long."""
    ordered, half = sorted(values), len(values) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
