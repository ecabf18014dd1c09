"""Which trees are still being grown, and whether those that are here wait for them.

A step streams the weights once, for one tree or for many: on a GPU two steps of a few trees each
cost nearly twice as much as one of all. So requests whose trees were ordered together are verified
together, and a request that missed the step is in the next one again. Two groups that take turns,
one with the draft while the other is verified, would hide the draft's time; but each group pays for
a step of its own on the host as well, and that was slower wherever weights were most of a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from target_service.step_costs import StepCosts

_PATIENCE = 1.5
# Of a forward of one row, which is hardly more than the streaming of weights.
_LEAST_SAVING = 0.5
_EWMA_WEIGHT = 0.2
# One tree that had to wait for a kernel must not hold up the others.
_MOST_GROWTH_S = 0.05


class BatchWindow:
    """Trees that the target has ordered itself.

    Args:
        costs: Of a forward, by its rows; None: not known, no tree waits.
    """

    def __init__(self, costs: StepCosts | None) -> None:
        self._costs = costs
        self._ordered: dict[str, tuple[int, int]] = {}  # when, how many rows
        self._newest_ns = 0
        self._mean_s = 0.0  # from an order to its tree

    @property
    def is_growing(self) -> bool:
        """Return whether trees are being grown."""
        return bool(self._ordered)

    @property
    def growing(self) -> Iterator[tuple[str, int]]:
        """Yield (request_id, rows) of every tree that is being grown."""
        return ((request_id, rows) for request_id, (_, rows) in self._ordered.items())

    def wait_s(self, num_rows: int) -> float:
        """Return how long trees that are here should wait at most; 0 = not at all.

        They wait somewhat longer than growing took lately, where one step of all saves a good part
        of a step over two; steps of hundreds of rows save nothing.

        Args:
            num_rows: Of the trees that are here.
        """
        if not self._ordered or self._costs is None:
            return 0.0
        num_growing_rows = sum(rows for _, rows in self._ordered.values())
        of = self._costs.of
        if of(num_rows) + of(num_growing_rows) - of(
            num_rows + num_growing_rows
        ) < _LEAST_SAVING * of(1):
            return 0.0
        waited_s = (time.monotonic_ns() - self._newest_ns) / 1e9
        return max(0.0, _PATIENCE * self._mean_s - waited_s)

    def ordered(self, request_id: str, num_rows: int) -> int:
        """Take note of an order; return the time, in ns of the monotonic clock."""
        self._newest_ns = time.monotonic_ns()
        self._ordered[request_id] = (self._newest_ns, num_rows)
        return self._newest_ns

    def arrived(self, request_id: str) -> None:
        """Take note that a tree is here."""
        ordered_ns, _ = self._ordered.pop(request_id, (0, 0))
        if ordered_ns:
            took_s = min((time.monotonic_ns() - ordered_ns) / 1e9, _MOST_GROWTH_S)
            self._mean_s += (_EWMA_WEIGHT if self._mean_s else 1.0) * (took_s - self._mean_s)

    def gave_up(self, request_id: str) -> None:
        """Take note that a tree is not waited for any more."""
        self._ordered.pop(request_id, None)
