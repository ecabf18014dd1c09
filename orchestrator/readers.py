"""Clients that do not read: paced first, then ended, so that nobody waits for what they hold.

    paced   a stream with so many events or bytes unread gets no more credit (outgoing.py)
    ended   nothing was read for `timeout_s`; for less where it holds a place that others wait
            for, or if all streams together hold too many bytes; and after `lifetime_s`, whatever
            was read

Both ends are UNAVAILABLE: a client that goes on resumes after the tokens that it has read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from orchestrator.admission import Place
from orchestrator.outgoing import Outgoing, WriteTurns
from shared.errors import CoppiceError, UnavailableError

MOST_LOOK_S = 0.5
CROWDED_S = 5.0
"""A paced stream may hold its place so long without reading while others wait for one."""
_RESUME = "send it again with resume_token_ids to go on"


class Reader:
    """One client; `is_writing` goes around each write to it.

    Args:
        end: Ends its stream.
    """

    def __init__(self, events: Outgoing, place: Place, end: Callable[[], None]) -> None:
        self.events = events
        self.place = place
        self.error: CoppiceError | None = None
        """Why its stream was ended from outside; None: it was not."""
        self._is_open = True
        self._end = end
        self.num_looks = 0
        """How often the write in progress was looked at: time that this process was stopped does
        not count."""
        self._is_writing = False

    def begin_write(self) -> None:
        """Take note that something is written."""
        self._is_writing = True

    def end_write(self) -> None:
        """Take note that it was: the client reads, or has not lagged much yet."""
        self._is_writing = False
        self.num_looks = 0

    def look(self) -> None:
        """Count a look at a write that goes on."""
        self.num_looks += self._is_writing

    def end(self, error: CoppiceError) -> None:
        """End the stream with an error, whatever its client has not read."""
        if self._is_open:
            self.error = error
            self._end()
            self.close()

    def close(self) -> None:
        """Take note that the stream ends: it must not be ended again."""
        self._is_open = False


class Readers:
    """The clients that are being written to.

    Args:
        turns: Of the same streams; it counts what they have not read.
        timeout_s: That a client may read nothing for.
        lifetime_s: Of a stream.
        max_unread_bytes: Of all streams.
        is_crowded: Says whether requests wait for others to end.
    """

    def __init__(
        self,
        turns: WriteTurns,
        *,
        timeout_s: float,
        lifetime_s: float,
        max_unread_bytes: int,
        is_crowded: Callable[[], bool],
    ) -> None:
        self._turns = turns
        self._timeout_s = timeout_s
        self._crowded_s = min(CROWDED_S, timeout_s)
        self._lifetime_s = lifetime_s
        self._max_unread_bytes = max_unread_bytes
        self._is_crowded = is_crowded
        self._look_s = min(MOST_LOOK_S, timeout_s / 4)
        self._readers: set[Reader] = set()
        self._is_looking = False

    @asynccontextmanager
    async def watched(self, events: Outgoing, place: Place) -> AsyncIterator[Reader]:
        """Watch a client while it is written to.

        Raises: out of the block, the error that its stream is ended with; UnavailableError if it
            is open for too long.
        """
        loop = asyncio.get_running_loop()
        patience = asyncio.timeout(self._lifetime_s)
        reader = Reader(events, place, lambda: patience.reschedule(loop.time()))
        self._readers.add(reader)
        self._look_later(loop)
        try:
            async with patience:
                yield reader
        except TimeoutError:
            if not patience.expired():
                raise
            raise reader.error or self._too_old from None
        finally:
            reader.close()
            self._readers.discard(reader)

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_looking:
            self._is_looking = True
            loop.call_later(self._look_s, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the streams of those who do not read."""
        self._is_looking = False
        if not self._readers:
            return
        self._look_later(loop)
        is_crowded = self._is_crowded()
        for reader in self._readers:
            reader.look()
            in_the_way = is_crowded and reader.place.is_held and not reader.events.has_room
            limit_s = self._crowded_s if in_the_way else self._timeout_s
            if reader.num_looks * self._look_s >= limit_s:
                reader.end(self._silence_of(reader))
        self._shed(self._turns.num_unread_bytes - self._max_unread_bytes)

    def _shed(self, num_bytes: int) -> None:
        """End those who read nothing and have most to read, until so many bytes are dropped."""
        if num_bytes <= 0:
            return
        for reader in sorted(self._readers, key=lambda reader: -reader.events.num_bytes):
            if num_bytes > 0 and reader.num_looks:
                num_bytes -= reader.events.num_bytes
                reader.end(self._silence_of(reader))

    def _silence_of(self, reader: Reader) -> UnavailableError:
        silent_s = reader.num_looks * self._look_s
        return UnavailableError(
            f"the client read nothing of what it was sent for {silent_s:.1f} s; {_RESUME}",
            reason="SLOW_READER",
        )

    @property
    def _too_old(self) -> UnavailableError:
        return UnavailableError(
            f"the stream is open for {self._lifetime_s:g} s, which is as long as any may be; "
            f"{_RESUME}",
            reason="STREAM_TOO_OLD",
        )
