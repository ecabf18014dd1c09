"""What a forward costs by its rows, measured once at start-up."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np


class StepCosts:
    """A table from rows to seconds.

    Args:
        rows: Ascending row counts that were measured.
        seconds: What a forward of each took, without context.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        assert rows and len(rows) == len(seconds)
        self._rows = tuple(rows)
        # As a rule, what took longer than more rows did had to wait for something else.
        self._measured = tuple(seconds)
        self._seconds = tuple(itertools.accumulate(reversed(seconds), min))[::-1]
        self.of: Callable[[int], float] = functools.cache(self._of)
        """Return what so many rows cost, in seconds; in proportion past the last one measured."""

    def _of(self, num_rows: int) -> float:
        if num_rows > self._rows[-1]:
            return self._seconds[-1] * num_rows / self._rows[-1]
        return float(np.interp(num_rows, self._rows, self._seconds)) if num_rows else 0.0

    @property
    def sizes(self) -> Iterator[tuple[int, float]]:
        """Yield the row counts that were measured, ascending, and what each costs in seconds."""
        return zip(self._rows, self._seconds, strict=True)

    def __str__(self) -> str:
        pairs = zip(self._rows, self._measured, strict=True)
        return ", ".join(f"{rows} {seconds * 1e3:.2f}" for rows, seconds in pairs)
