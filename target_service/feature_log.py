"""Feature rows of one request's committed tokens: an ordered, acknowledged stream.

Rows by position:

    [0, start)        gone (acknowledged, sent with an order, or past the budget): replayed when
                      asked for
    [start, end)      retained
    [next, end)       not sent to the subscriber yet; next < start: a gap that replay closes first

While a request rests, its new rows are kept in resting_rows.py instead. If nobody is likely to want
them, they are kept nowhere, and all of them are replayed if the request wakes after all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shared.peer.channel import PeerChannel

FeatureRows = NDArray[np.uint8]
"""[.., row_bytes]"""


@dataclass(slots=True, kw_only=True, eq=False)
class FeatureLog:
    """Feature rows of one request, and where its subscriber stands.

    Args:
        retain_rows: Budget; the oldest rows go first.
        start: Position of the oldest row retained.
        end: Position after the newest row.
        next: Next position to send; None while there is no subscriber.
        reads_ring: Whether the subscriber can read the feature ring.
        channel: To the subscriber's engine; None: the subscriber has a stream at the front.
        is_replaying: A step in flight computes rows again.
        is_held_back: Nothing is sent for now: the request rests.
        is_dormant: Rows are not even kept, nor copied to the host: all are replayed on waking.
        rested_since: `RestedRows.end` when the request began to rest: rows since then are kept
            there. None: the request does not rest, and rows are kept here.
    """

    retain_rows: int
    start: int = 0
    end: int = 0
    next: int | None = None
    reads_ring: bool = False
    channel: PeerChannel | None = None
    is_replaying: bool = False
    is_held_back: bool = False
    is_dormant: bool = False
    rested_since: int | None = None
    _blocks: deque[FeatureRows] = field(default_factory=deque)  # each [n, row_bytes]

    def append(self, position: int, rows: FeatureRows) -> None:
        """Keep the rows of newly committed tokens.

        Args:
            position: Position of rows[0]; must be `end`.
            rows: [n, row_bytes] u8.
        """
        assert position == self.end, f"row {position} appended at {self.end}"
        self._blocks.append(rows)
        self.end += len(rows)

    def has_sent(self, position: int) -> bool:
        """Return whether the row of a position has been sent to the subscriber."""
        return self.next is not None and self.next > position

    def append_rested(self, position: int, rows: FeatureRows) -> None:
        """Keep rows that were kept in RestedRows; rows between `end` and these are gone."""
        if position > self.end:
            self.skip_to(position)
        self.append(position, rows)

    def skip_to(self, position: int) -> None:
        """Drop all rows; the next row to append is that of `position`."""
        self._blocks.clear()
        self.start = self.end = position

    def trim(self) -> None:
        """Drop the oldest whole blocks past the budget.

        Comes after `take_unsent`: else a subscriber whose gap was just closed would find a new one
        at every step, and never catch up.
        """
        while self._blocks and self.end - self.start - len(self._blocks[0]) >= self.retain_rows:
            self.start += len(self._blocks.popleft())

    def subscribe(
        self, from_position: int, *, reads_ring: bool = False, channel: PeerChannel | None = None
    ) -> None:
        """Send every row from `from_position` on."""
        self.next = from_position
        self.reads_ring = reads_ring or (channel is not None and channel.shares_memory)
        self.channel = channel

    def unsubscribe(self) -> None:
        """Send nothing more."""
        self.next = self.channel = None

    def acknowledge(self, position: int) -> None:
        """Drop whole blocks below `position`; the subscriber has them."""
        while self._blocks and self.start + len(self._blocks[0]) <= position:
            self.start += len(self._blocks.popleft())

    @property
    def is_settled(self) -> bool:
        """Return whether there is nothing to send and nothing to drop."""
        if self.end - self.start > self.retain_rows:
            return False
        return self.is_held_back or self.next is None or self.next == self.end

    @property
    def gap(self) -> tuple[int, int] | None:
        """Return the rows [from, to) that must be replayed before anything can be sent."""
        if self.next is None or self.next >= self.start:
            return None
        return self.next, self.start

    @property
    def gap_to_replay(self) -> tuple[int, int] | None:
        """Return the rows [from, to) to replay now, unless a step in flight replays some."""
        return None if self.is_replaying or self.is_held_back else self.gap

    def take_unsent(self) -> Iterator[tuple[int, FeatureRows]]:
        """Yield (position, rows [n, row_bytes]) of what can be sent now."""
        if self.next is None or self.is_held_back or self.gap is not None:
            return
        position = self.start
        for block in self._blocks:
            first = max(self.next - position, 0)
            if first < len(block):
                yield position + first, block[first:]
                self.next = position + len(block)
            position += len(block)
