"""How fast a processor computes now that others use as well."""

from __future__ import annotations

import statistics
from collections import deque

# Steps whose median counts.
_NUM_STEPS = 5
_MOST = 100.0


class Pace:
    """What a step takes now, compared with what its forward took alone at start-up.

    While others compute on the same cores, all rounds take longer, with trees or without. Times are
    compared and kept as if nobody did: trees get neither the blame for it nor the praise.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_NUM_STEPS)
        self.value = 1.0
        """1: as fast as at start-up; 2: everything takes twice as long."""

    def note(self, computed_s: float, forward_s: float) -> None:
        """Take note of a step.

        Args:
            computed_s: What it took.
            forward_s: What a forward of its rows took at start-up, more than 0.
        """
        self._ratios.append(min(max(computed_s / forward_s, 1 / _MOST), _MOST))
        self.value = statistics.median(self._ratios)
