"""Events on their way to clients: who may write when, and what leaves together.

A write costs a system call and several passes of the event loop, a path costs little. So the paths
of all requests are taken first, and few writes start per pass of the loop. A stream whose turn has
not come yet collects rounds; they leave as one message. While the process keeps up every turn comes
at once, and every round leaves by itself.
"""

from __future__ import annotations

import asyncio
from collections import deque

from shared.messages import GenerateEvent, TokenDelta

WRITES_PER_PASS = 16
"""Writes that start between two looks for messages of workers; about a millisecond's work."""
MAX_UNREAD = 256
"""Events that may wait for a client before its request gets no more credit."""
MAX_MERGED = 64
"""Rounds in one message, at most."""


class WriteTurns:
    """Lets the streams of a process write in turn, a few per pass of the event loop."""

    def __init__(self, per_pass: int = WRITES_PER_PASS) -> None:
        self._per_pass = per_pass
        self._num_left = per_pass
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    def ask(self, turn: asyncio.Future[None]) -> None:
        """Let `turn` be done when it has come: at once, as long as few streams write."""
        if self._num_left:
            self._num_left -= 1
            turn.set_result(None)
        else:
            self._waiting.append(turn)
        if not self._is_scheduled:
            self._is_scheduled = True
            turn.get_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        self._num_left = self._per_pass
        waiting = self._waiting
        while waiting and self._num_left:
            turn = waiting.popleft()
            if not turn.done():  # else it was cancelled, or did not wait any longer
                self._num_left -= 1
                turn.set_result(None)
        self._is_scheduled = self._num_left < self._per_pass
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._next_pass)


class Outgoing:
    """The events of one request that its client has not got yet; one task takes them.

    The first delta, and whatever is no delta, does not wait for a turn.
    """

    def __init__(self, turns: WriteTurns | None = None) -> None:
        self._turns = turns or WriteTurns()
        self._events: deque[GenerateEvent | None] = deque()
        self._turn: asyncio.Future[None] | None = None
        self._is_turn_asked = False
        self._has_delta_left = False
        self._room: asyncio.Future[None] | None = None

    def put(self, event: GenerateEvent | None) -> None:
        """Add an event; None is the end."""
        self._events.append(event)
        if self._turn is not None and not self._turn.done():
            self._ask(self._turn)

    async def take(self) -> list[GenerateEvent]:
        """Wait for events and for the turn to write; return what leaves as one message.

        Returns: one event, or deltas that follow each other; empty at the end.
        """
        self._turn = asyncio.get_running_loop().create_future()
        self._is_turn_asked = False
        if self._events:
            self._ask(self._turn)
        await self._turn
        taken = self._take_one_message()
        if self._room is not None and not self._room.done() and self.has_room:
            self._room.set_result(None)
        return taken

    def _take_one_message(self) -> list[GenerateEvent]:
        events = self._events
        first = events.popleft()
        if first is None or not isinstance(first, TokenDelta):
            return [] if first is None else [first]
        self._has_delta_left = True
        taken: list[GenerateEvent] = [first]
        while events and len(taken) < MAX_MERGED and isinstance(delta := events[0], TokenDelta):
            taken.append(delta)
            events.popleft()
        return taken

    @property
    def has_room(self) -> bool:
        """Return whether the client reads as fast as its request is served, nearly."""
        return len(self._events) < MAX_UNREAD

    async def wait_room(self) -> None:
        """Wait until the client has read enough."""
        if not self.has_room:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def get_nowait(self) -> GenerateEvent | None:
        """Return the next event by itself, at once; None is the end."""
        return self._events.popleft()

    def qsize(self) -> int:
        """Return the events that wait, the end included."""
        return len(self._events)

    def empty(self) -> bool:
        """Return whether nothing waits, not even the end."""
        return not self._events

    def _ask(self, turn: asyncio.Future[None]) -> None:
        """Ask for a turn, or take it: what ends an output, or begins it, never waits."""
        if not self._has_delta_left or not isinstance(self._events[-1], TokenDelta):
            turn.set_result(None)
        elif not self._is_turn_asked:
            self._is_turn_asked = True
            self._turns.ask(turn)
