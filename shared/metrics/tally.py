"""Counts for hot paths: an addition to an integer, read by somebody else later."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence


class Tally:
    """A histogram; adding to it costs a bisection.

    Args:
        bounds: Ascending upper bounds of the buckets, each included; the last bucket has none.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def merge(self, other: Tally) -> None:
        """Add what another tally with the same bounds has counted."""
        for place, count in enumerate(other.counts):
            self.counts[place] += count
        self.total += other.total


class StageClock:
    """Adds up the time of the stages that a loop goes through, nanoseconds.

    Args:
        stages: Names of all stages.
    """

    __slots__ = ("_at_ns", "ns")

    def __init__(self, stages: Sequence[str]) -> None:
        self.ns = dict.fromkeys(stages, 0)
        self._at_ns = 0

    def begin(self) -> int:
        """Begin the first stage now: what was before belongs to none; return the time, as `end`."""
        self._at_ns = time.monotonic_ns()
        return self._at_ns

    def end(self, stage: str) -> int:
        """End a stage, and begin the next one; return the time, monotonic ns."""
        now_ns = time.monotonic_ns()
        self.ns[stage] += now_ns - self._at_ns
        self._at_ns = now_ns
        return now_ns
