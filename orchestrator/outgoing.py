"""Events on their way to clients: who may write when, and what leaves together.

A write costs a system call and several passes of the event loop, a path costs little. So the paths
of all requests are taken first, few writes start per pass of the loop, and all writes of a process
come out of one allowance. A stream whose turn has not come yet collects rounds; they leave as one
message. While there are few streams every turn comes at once, and every round leaves by itself.

What a write costs differs from machine to machine. Where the loop is hardly ever idle, the
allowance shrinks until it is: tokens keep up, in fewer messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from shared.messages import GenerateEvent, TokenDelta

WRITES_PER_PASS = 16
"""Writes that start between two looks for messages of workers; about a millisecond's work."""
WRITES_PER_S = 8000
"""Writes of a process that the allowance grows by per second, at most; about a third of the work of
a core that does nothing else."""
LEAST_WRITES_PER_S = 1000
"""The same where there is no time for more."""
MAX_ALLOWANCE = 128
"""Writes that may leave at once, as after a step for so many requests."""
_PAUSE_S = 0.001
# How often the loop's idle share is looked at, and which shares are too small, or large enough for
# more writes.
_LOOK_S = 0.05
_LEAST_IDLE, _MUCH_IDLE = 0.04, 0.12
_SHRINK, _GROW = 0.8, 1.1
MAX_UNREAD = 256
"""Events that may wait for a client before its request gets no more credit .."""
MAX_UNREAD_BYTES = 1 << 20
""".. and the bytes that these may take."""
# What Python takes for the tokens of a round, for a log-probability, and for a node of a tree.
_EVENT_BYTES, _LOGPROB_BYTES, _NODE_BYTES = 700, 120, 150
MAX_MERGED = 64
"""Rounds in one message, at most."""


class WriteTurns:
    """Lets the streams of a process write in turn: a few per pass of the event loop, and second.

    Args:
        most_per_s: Turns that come in one second at most, beyond the first `MAX_ALLOWANCE`.
        idle_s: How long the loop has been idle so far; None: nobody knows, and nothing shrinks.
    """

    def __init__(
        self, most_per_s: float = WRITES_PER_S, *, idle_s: Callable[[], float] | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._most_per_s = most_per_s
        self._idle_s = idle_s
        self._looked_at = self._loop.time()
        self._idle_before_s = 0.0 if idle_s is None else idle_s()
        self.per_s = most_per_s
        """Turns that come in one second now."""
        self._allowance = float(MAX_ALLOWANCE)
        self._grown_at = self._loop.time()
        self._num_left = 0  # turns of this pass
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False
        self.num_unread_bytes = 0
        """Of the events of all streams that wait to be written."""

    def ask(self, turn: asyncio.Future[None]) -> None:
        """Let `turn` be done when it has come: at once, as long as few streams write."""
        if not self._is_scheduled:
            self._begin_pass()
        if self._num_left:
            self._num_left -= 1
            turn.set_result(None)
        else:
            self._waiting.append(turn)

    def _begin_pass(self) -> None:
        """Let the turns of this pass come; if there are none yet, look again after a while."""
        now = self._loop.time()
        grown = self._allowance + (now - self._grown_at) * self.per_s
        self._allowance, self._grown_at = min(grown, MAX_ALLOWANCE), now
        self._num_left = min(WRITES_PER_PASS, int(self._allowance))
        self._allowance -= self._num_left
        if self._num_left:
            self._loop.call_soon(self._end_pass)
        else:
            self._loop.call_later(_PAUSE_S, self._end_pass)
        self._is_scheduled = True
        self._fit(now)
        waiting = self._waiting
        while waiting and self._num_left:
            turn = waiting.popleft()
            if not turn.done():  # else it was cancelled, or did not wait any longer
                self._num_left -= 1
                turn.set_result(None)

    def _fit(self, now: float) -> None:
        """Fit the turns per second to the time that the loop has left."""
        took_s = now - self._looked_at
        if self._idle_s is None or took_s < _LOOK_S:
            return
        idle_s = self._idle_s()
        share = (idle_s - self._idle_before_s) / took_s
        self._looked_at, self._idle_before_s = now, idle_s
        if share < _LEAST_IDLE:
            self.per_s = max(LEAST_WRITES_PER_S, _SHRINK * self.per_s)
        elif share > _MUCH_IDLE:
            self.per_s = min(self._most_per_s, _GROW * self.per_s)

    def _end_pass(self) -> None:
        self._is_scheduled = False
        self._allowance += self._num_left  # which nobody took
        if self._waiting:
            self._begin_pass()


class Outgoing:
    """The events of one request that its client has not got yet; one task takes them.

    The first delta, and whatever is no delta, does not wait for a turn.
    """

    def __init__(self, turns: WriteTurns | None = None) -> None:
        self._turns = turns or WriteTurns()
        self._events: deque[GenerateEvent | None] = deque()
        self.num_bytes = 0
        """What the events that wait take, about."""
        self._turn: asyncio.Future[None] | None = None
        self._is_turn_asked = False
        self._has_delta_left = False
        self._is_discarded = False
        self._room: asyncio.Future[None] | None = None

    def put(self, event: GenerateEvent | None) -> None:
        """Add an event; None is the end."""
        if self._is_discarded:
            return
        self._events.append(event)
        self._count(_size_of(event))
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
        first = self._pop()
        if first is None or not isinstance(first, TokenDelta):
            return [] if first is None else [first]
        self._has_delta_left = True
        taken: list[GenerateEvent] = [first]
        while events and len(taken) < MAX_MERGED and isinstance(delta := events[0], TokenDelta):
            taken.append(delta)
            self._pop()
        return taken

    @property
    def has_room(self) -> bool:
        """Return whether the client reads as fast as its request is served, nearly."""
        return len(self._events) < MAX_UNREAD and self.num_bytes < MAX_UNREAD_BYTES

    async def wait_room(self) -> None:
        """Wait until the client has read enough."""
        if not self.has_room:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def discard(self) -> None:
        """Drop what waits, and whatever still comes: nobody takes it any more."""
        self._is_discarded = True
        while self._events:
            self._pop()

    def __len__(self) -> int:
        """Return the events that wait, the end included."""
        return len(self._events)

    def _pop(self) -> GenerateEvent | None:
        event = self._events.popleft()
        self._count(-_size_of(event))
        return event

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._turns.num_unread_bytes += num_bytes

    def _ask(self, turn: asyncio.Future[None]) -> None:
        """Ask for a turn, or take it: what ends an output, or begins it, never waits."""
        if not self._has_delta_left or not isinstance(self._events[-1], TokenDelta):
            turn.set_result(None)
        elif not self._is_turn_asked:
            self._is_turn_asked = True
            self._turns.ask(turn)


def _size_of(event: GenerateEvent | None) -> int:
    """Return what an event takes in memory, about."""
    if not isinstance(event, TokenDelta):
        return _EVENT_BYTES
    routed = event.routed_experts
    if not (event.logprobs or event.tree or routed):
        return _EVENT_BYTES
    num_bytes = _EVENT_BYTES + _LOGPROB_BYTES * sum([1 + len(each.top) for each in event.logprobs])
    num_bytes += len(routed.ids) if routed else 0
    return num_bytes + (_NODE_BYTES * len(event.tree.token_ids) if event.tree else 0)
