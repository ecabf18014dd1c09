"""Feature rows of requests that rest: kept step by step for all of them, sent to nobody.

While a request rests nobody reads its rows, and it may end before anybody does. So a step's rows
are kept as they come, whatever the number of requests, over the oldest ones. Those of one request
are looked for when trees are wanted of it again; what is no longer there then is replayed.

A target with a GPU takes and touches the memory at its start: a page that is touched for the first
time takes some microseconds, which was 2 ms of a step of 256 requests.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
FeatureRows = NDArray[np.uint8]
"""[.., row_bytes]"""

MAX_RESTED_BYTES = 512 << 20
"""Of the memory for rows that are kept; the oldest ones go first."""
_MAX_RESTED_ROWS = 1 << 16
_NOBODY = -1


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


class RestedRun(NamedTuple):
    """Rows of a request at positions one behind the other.

    Args:
        position: Of the first.
        places: [n], where they lie.
    """

    position: int
    places: Ints


class RestedRows:
    """The rows that were kept last.

    Args:
        row_bytes: Of a row.

    Attributes:
        end: Rows that were ever kept.
    """

    def __init__(self, row_bytes: int, max_bytes: int = MAX_RESTED_BYTES) -> None:
        self.end = 0
        self._row_bytes = row_bytes
        self._capacity = min(max_bytes // max(row_bytes, 1), _MAX_RESTED_ROWS)
        # Of each place: whose row is there, and which.
        self._slots = np.zeros(0, dtype=np.int32)
        self._positions = np.zeros(0, dtype=np.int32)
        self._rows: FeatureRows | None = None

    def reserve(self, *, is_touched: bool = True) -> None:
        """Take the memory, unless it was taken.

        Args:
            is_touched: All of it at once, not page by page as rows come.
        """
        num_bytes = self._capacity * self._row_bytes
        if self._rows is not None or not num_bytes:
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (mmap.MAP_POPULATE if is_touched else 0)
        memory = np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=np.uint8)
        self._rows = memory.reshape(self._capacity, self._row_bytes)
        self._slots = np.full(self._capacity, _NOBODY, dtype=np.int32)
        self._positions = np.zeros(self._capacity, dtype=np.int32)

    def append(self, paths: Sequence[RestedPath], features: FeatureRows) -> None:
        """Keep the rows of some paths of a step.

        Args:
            features: [B, D + 1, row_bytes], of all paths of the step.
        """
        self.reserve(is_touched=False)
        row, slots, positions, counts = np.array(paths, dtype=np.int64).T
        num_rows = int(counts.sum())
        begin, self.end = self.end, self.end + num_rows
        if num_rows > self._capacity or self._rows is None:
            self._slots.fill(_NOBODY)
            return
        node = np.arange(num_rows) - (counts.cumsum() - counts).repeat(counts)
        of_step = row.repeat(counts) * features.shape[1] + node
        slots, positions = slots.repeat(counts), positions.repeat(counts) + node
        step = features.reshape(-1, self._row_bytes)
        for part, places in self._places(begin, num_rows):
            np.take(step, of_step[part], axis=0, out=self._rows[places], mode="clip")
            self._slots[places], self._positions[places] = slots[part], positions[part]

    def _places(self, begin: int, num_rows: int) -> Iterator[tuple[slice, slice]]:
        """Yield for rows of a step where they go: at once, or up to the memory's end and on from
        its beginning.
        """
        first = begin % self._capacity
        size = min(num_rows, self._capacity - first)
        yield slice(size), slice(first, first + size)
        if size < num_rows:
            yield slice(size, num_rows), slice(num_rows - size)

    def newest(self, slot: int, since: int) -> RestedRun | None:
        """Return the newest rows of the request that holds a slot, as far back as they are here
        without a gap; None: there are none.

        Args:
            since: `end` when it began to rest.
        """
        places = np.flatnonzero(self._slots == slot)
        cut = self.end % max(self._capacity, 1)  # the oldest row's
        places = np.concatenate([places[places >= cut], places[places < cut]])
        numbers = self.end - 1 - (self.end - 1 - places) % max(self._capacity, 1)
        places = places[numbers >= since]
        if not len(places):
            return None
        positions = self._positions[places]
        gaps = np.flatnonzero(np.diff(positions) != 1)
        first = int(gaps[-1]) + 1 if len(gaps) else 0
        return RestedRun(int(positions[first]), places[first:])

    def copy(self, places: Ints, out: FeatureRows | None = None) -> FeatureRows:
        """Return the rows at some places, [n, row_bytes].

        Args:
            out: Where to copy them.
        """
        assert self._rows is not None
        return np.take(self._rows, places, axis=0, out=out, mode="clip")

    def has_all(self, since: int) -> bool:
        """Return whether all rows are still here that were kept since then.

        Args:
            since: `end` at that time.
        """
        return since >= self.end - self._capacity
