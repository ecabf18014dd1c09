"""Feature rows of requests that rest: kept step by step for all of them, sent to nobody.

While a request rests nobody reads its rows, and it may end before anybody does. So the rows of a
step are kept as one block, whatever the number of requests. Those of one request are looked for
when trees are wanted of it again; what is no longer there then is replayed.

Blocks lie one behind the other in memory that stays, all of which is touched in the end: memory of
their own, that is given back and taken again with each step, took 2 ms of a step of 256 requests.
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
"""Of the memory for rows that are kept; the oldest steps go first."""


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
        rows: [n, row_bytes], in the memory for all steps.
        begin, stop: Bytes of that.
    """

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    ends: NDArray[np.int64]
    rows: FeatureRows
    begin: int
    stop: int


class RestedRows:
    """Rows of the last steps.

    Attributes:
        end: Number of the next step.
    """

    def __init__(self, max_bytes: int = MAX_RESTED_BYTES) -> None:
        self.end = 0
        self._max_bytes = max_bytes
        self._memory: NDArray[np.uint8] | None = None
        self._steps: deque[_Step] = deque()  # the last one is that before `end`

    def append(self, paths: Sequence[RestedPath], features: FeatureRows) -> None:
        """Keep the rows of some paths of a step.

        Args:
            features: [B, D + 1, row_bytes], of all paths of the step.
        """
        row, slots, positions, counts = np.array(paths, dtype=np.int64).T
        ends = counts.cumsum()
        num_rows, row_bytes = int(ends[-1]), features.shape[2]
        num_bytes = num_rows * row_bytes
        self.end += 1
        if num_bytes > self._max_bytes:
            self._steps.clear()
            return
        if self._memory is None:
            self._memory = np.empty(self._max_bytes, dtype=np.uint8)
        begin = self._make_room(num_bytes)
        stop = begin + num_bytes
        rows = self._memory[begin:stop].reshape(num_rows, row_bytes)
        if len(paths) == len(features) and features.shape[1] == 1:
            rows[:] = features[:, 0]
        else:
            node = np.arange(num_rows) - (ends - counts).repeat(counts)
            places = row.repeat(counts) * features.shape[1] + node
            np.take(features.reshape(-1, row_bytes), places, axis=0, out=rows, mode="clip")
        self._steps.append(_Step(slots, positions, ends, rows, begin, stop))

    def drop_before(self, step: int) -> None:
        """Drop steps that no request needs."""
        while self._steps and self._first < step:
            self._steps.popleft()

    def of(self, slot: int, since: int) -> Iterator[tuple[int, FeatureRows]]:
        """Yield (position, rows [n, row_bytes]) of the request that holds a slot, as far as they
        are there; copy what outlives the next step.

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

    def _make_room(self, num_bytes: int) -> int:
        """Return where so many bytes begin that no step has; the oldest ones make room."""
        begin = self._steps[-1].stop if self._steps else 0
        if begin + num_bytes > self._max_bytes:
            while self._steps and self._steps[0].begin >= begin:  # the rest of the memory
                self._steps.popleft()
            begin = 0
        stop = begin + num_bytes
        while self._steps and begin <= self._steps[0].begin < stop:
            self._steps.popleft()
        return begin
