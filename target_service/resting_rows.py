"""Feature rows of requests that rest: kept step by step for all of them, sent to nobody.

While a request rests nobody reads its rows, and it may end before anybody does. So the rows of a
step are kept as one block, whatever the number of requests. Those of one request are looked for
when trees are wanted of it again; what is no longer there then is replayed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FeatureRows = NDArray[np.uint8]
"""[.., row_bytes]"""

MAX_RESTED_BYTES = 512 << 20
"""Of all rows that are kept; the oldest steps go first."""


class RestedPath(NamedTuple):
    """Where the rows of a request that rests are among those of a step.

    Args:
        row: The request's row in the step's PathOutputs.
        slot: Its row of the page table.
        position: Of the first row.
        num_rows: So many.
    """

    row: int
    slot: int
    position: int
    num_rows: int


class _Step(NamedTuple):
    """The rows of a step, one path after the other.

    Args:
        slots, positions, ends: [B], no slot twice; the rows of path i end before rows[ends[i]].
        rows: [n, row_bytes].
    """

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    ends: NDArray[np.int64]
    rows: FeatureRows


class RestedRows:
    """Rows of the last steps.

    Attributes:
        end: Number of the next step.
    """

    def __init__(self, max_bytes: int = MAX_RESTED_BYTES) -> None:
        self.end = 0
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._steps: deque[_Step] = deque()  # the last one is that before `end`

    def append(self, paths: Sequence[RestedPath], features: FeatureRows) -> None:
        """Keep the rows of some paths of a step.

        Args:
            features: [B, D + 1, row_bytes], of all paths of the step.
        """
        row, slots, positions, counts = np.array(paths, dtype=np.int64).T
        ends = counts.cumsum()
        if len(paths) == len(features) and features.shape[1] == 1:
            rows = features[:, 0].copy()
        else:
            node = np.arange(ends[-1]) - (ends - counts).repeat(counts)
            rows = features[row.repeat(counts), node]
        self._steps.append(_Step(slots, positions, ends, rows))
        self._num_bytes += rows.nbytes
        self.end += 1
        while self._num_bytes > self._max_bytes:
            self._drop_first()

    def drop_before(self, step: int) -> None:
        """Drop steps that no request needs."""
        while self._steps and self._first < step:
            self._drop_first()

    def of(self, slot: int, since: int) -> Iterator[tuple[int, FeatureRows]]:
        """Yield (position, rows [n, row_bytes]) of the request that holds a slot, as far as they
        are there.

        Args:
            since: The step with which it began to rest.
        """
        place = 0  # mostly the same in all steps
        for step in itertools.islice(self._steps, max(since - self._first, 0), None):
            if place >= len(step.slots) or step.slots[place] != slot:
                found = np.flatnonzero(step.slots == slot)
                if not len(found):
                    continue
                place = int(found[0])
            first = int(step.ends[place - 1]) if place else 0
            yield int(step.positions[place]), step.rows[first : int(step.ends[place])]

    def has_all(self, since: int) -> bool:
        """Return whether the rows of a step, and of all after it, are still here."""
        return since >= self._first

    @property
    def _first(self) -> int:
        """Return the number of the oldest step."""
        return self.end - len(self._steps)

    def _drop_first(self) -> None:
        self._num_bytes -= self._steps.popleft().rows.nbytes
