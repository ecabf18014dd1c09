"""Keep the feature rows of all resting requests in one ring buffer, the oldest rows overwritten.

While a request rests its draft reads no rows, and the request may end before the draft ever does.
Keeping a row must therefore be cheap: the rows of a step are appended to the ring in one copy,
whatever the number of requests. Finding the rows of one request (`RestedRows.newest`) is work for
the moment when the request wakes. Rows that have been overwritten by then are computed again (a
replay).

A target with a GPU allocates and touches the memory at its start: the first write to each page of
memory takes some microseconds, which added 2 ms to a step of 256 requests.
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
"""Most memory for the rows of resting requests."""
_MAX_RESTED_ROWS = 1 << 16
_NOBODY = -1


class RestedPath(NamedTuple):
    """Which of a step's feature rows belong to a resting request.

    Args:
        row: The request's row in the step's PathOutputs.
        slot: The request's row of the page table.
        position: Position of the first feature row.
        num_rows: Number of feature rows.
    """

    row: int
    slot: int
    position: int
    num_rows: int


class RestedRun(NamedTuple):
    """Kept feature rows of one request at consecutive positions.

    Args:
        position: Position of the first row.
        places: [n], indices of the rows in the ring.
    """

    position: int
    places: Ints


class RestedRows:
    """A ring buffer of the newest feature rows of resting requests.

    Rows are numbered as they are appended; row number n lies at place n % capacity.

    Args:
        row_bytes: Bytes of a row.
        max_bytes: Most memory for rows.

    Attributes:
        end: Number of the next row.
    """

    def __init__(self, row_bytes: int, max_bytes: int = MAX_RESTED_BYTES) -> None:
        self.end = 0
        self._row_bytes = row_bytes
        self._capacity = min(max_bytes // max(row_bytes, 1), _MAX_RESTED_ROWS)
        # By place: the slot and the position of the row that lies there.
        self._slots = np.zeros(0, dtype=np.int32)
        self._positions = np.zeros(0, dtype=np.int32)
        self._rows: FeatureRows | None = None

    def reserve(self, *, is_touched: bool = True) -> None:
        """Allocate the memory, unless it was allocated.

        Args:
            is_touched: Have the system provide all pages at once, not one by one as rows come.
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
        """Append the rows of some paths of a step.

        Args:
            paths: Which rows; at least one path.
            features: [B, D + 1, row_bytes], the rows of all paths of the step.
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

    def restart(self) -> None:
        """Begin again at the first place, because no request rests: only memory for as many rows as
        are needed at a time is ever touched.
        """
        self.end += -self.end % max(self._capacity, 1)

    def _places(self, begin: int, num_rows: int) -> Iterator[tuple[slice, slice]]:
        """Yield which of a step's rows go to which places: one pair of slices, or two if the rows
        wrap around at the end of the ring.

        Args:
            begin: Number of the first row.
        """
        first = begin % self._capacity
        size = min(num_rows, self._capacity - first)
        yield slice(size), slice(first, first + size)
        if size < num_rows:
            yield slice(size, num_rows), slice(num_rows - size)

    def newest(self, slot: int, since: int) -> RestedRun | None:
        """Return the newest rows of the request that holds a slot, back to the first gap; None: the
        ring holds none.

        Args:
            since: `end` when the request began to rest: older rows are those of earlier rests, or
                of earlier holders of the slot.
        """
        if self._rows is None:
            return None
        oldest = max(since, self.end - self._capacity)
        parts = [part for _, part in self._places(oldest, self.end - oldest)]
        places = np.concatenate(
            [(self._slots[part] == slot).nonzero()[0] + (part.start or 0) for part in parts]
        )
        if not len(places):
            return None
        positions = self._positions[places]
        gaps = np.flatnonzero(np.diff(positions) != 1)
        first = int(gaps[-1]) + 1 if len(gaps) else 0
        return RestedRun(int(positions[first]), places[first:])

    def copy(self, places: Ints, out: FeatureRows | None = None) -> FeatureRows:
        """Copy the rows at some places, [n, row_bytes].

        Args:
            out: Where to copy the rows to; None: to new memory.
        Returns: The copy.
        """
        assert self._rows is not None
        return np.take(self._rows, places, axis=0, out=out, mode="clip")

    def has_all(self, since: int) -> bool:
        """Return whether none of the rows appended since a time has been overwritten.

        Args:
            since: `end` at that time.
        """
        return since >= self.end - self._capacity
