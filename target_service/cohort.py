"""Which trees are still being grown, and how long those that are here wait for them.

A step streams the weights once, for one tree or for many: two steps of a few trees each cost nearly
twice as much as one of all. So requests whose trees were ordered together are verified together,
and one that fell out of step falls in again at the next.
"""

from __future__ import annotations

import time

_PATIENCE = 1.5
_EWMA_WEIGHT = 0.2
_FIRST_GROWTH_S = 0.02


class Cohort:
    """Trees that the target has ordered itself."""

    def __init__(self) -> None:
        self._ordered_ns: dict[str, int] = {}
        self._newest_ns = 0
        self._mean_s = _FIRST_GROWTH_S

    @property
    def is_awaited(self) -> bool:
        """Return whether trees are on the way that are worth waiting for."""
        return bool(self._ordered_ns) and self.remaining_s() > 0

    def remaining_s(self) -> float:
        """Return how long to wait yet: somewhat longer than trees took lately."""
        waited_s = (time.monotonic_ns() - self._newest_ns) / 1e9
        return max(0.0, _PATIENCE * self._mean_s - waited_s)

    def ordered(self, request_id: str) -> int:
        """Take note of an order; return the time, in ns of the monotonic clock."""
        self._newest_ns = self._ordered_ns[request_id] = time.monotonic_ns()
        return self._newest_ns

    def arrived(self, request_id: str) -> None:
        """Take note that a tree is here."""
        ordered_ns = self._ordered_ns.pop(request_id, None)
        if ordered_ns is not None:
            took_s = (time.monotonic_ns() - ordered_ns) / 1e9
            self._mean_s += _EWMA_WEIGHT * (took_s - self._mean_s)

    def gave_up(self, request_id: str) -> None:
        """Take note that nobody waits for a tree any more."""
        self._ordered_ns.pop(request_id, None)
