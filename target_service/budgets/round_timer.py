"""Measure how long a round of all running requests takes.

A round may be spread over several steps, if requests take turns in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from target_service.budgets.costs import RoundKind

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


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


class TimedRound(NamedTuple):
    """A round of all requests.

    Args:
        kind: What its time depends on.
        took_s: From the end of the round before to the end of this round.
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
        ended_s = self._ended_s[slots]
        self._ended_s[slots] = now_s
        self._num_rows[slots] = times.num_rows / max(len(slots), 1)
        self._rungs[slots] = rungs
        is_clean, self._was_clean = times.is_clean and self._was_clean, times.is_clean
        if not is_clean or not len(slots) or not ended_s.all():
            return None
        # Rounds of requests without trees may be shorter: they do not wait for trees.
        with_trees = ended_s[rungs > 0]
        began_s = _median(with_trees if len(with_trees) else ended_s)
        kind = self._kind_since(began_s, max(times.num_requests, len(slots)))
        if kind.rung and not len(with_trees):
            return None
        return TimedRound(kind, now_s - began_s, now_s)

    def _kind_since(self, began_s: float, num_requests: int) -> RoundKind:
        """Return the kind of a round of all requests, from the rounds that ended since `began_s`.

        Requests may take turns in steps. Requests without a round since then are taken to be like
        the requests that had one.
        """
        ran = np.flatnonzero(self._ended_s > began_s)
        rungs = self._rungs[ran]
        scale = num_requests / len(ran)
        return RoundKind(
            num_requests=num_requests,
            num_rows=round(self._num_rows[ran].sum() * scale),
            rung=int(rungs.max()),
            num_trees=round(np.count_nonzero(rungs) * scale),
        )


def _median(values: Floats) -> float:
    """Return the median. For a few hundred values np.median takes three times as long."""
    ordered, half = np.sort(values), len(values) // 2
    if len(values) % 2:
        return float(ordered[half])
    return float(ordered[half - 1] + ordered[half]) / 2
