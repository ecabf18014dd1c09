"""What waits to be written to one stream; many producers on the loop, one writer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc.aio

from shared.errors import UnavailableError

MAX_MESSAGES = 65536
"""Messages that may wait; whoever does not read their answers is not heard then."""
WRITE_TIMEOUT_S = 60.0


class Outbox:
    """A list of messages that grows until the writer takes all of it at once.

    That is what makes batches: while a write is under way, whatever arrives joins the next one.
    """

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self.is_closed = False

    def put(self, messages: Iterable[Any]) -> None:
        """Add messages; after `close` they are dropped."""
        if not self.is_closed:
            self._messages.extend(messages)
            self._wake.set()

    def wake(self) -> None:
        """Let `take` return even without messages."""
        self._wake.set()

    def close(self) -> None:
        """Let `take` return what is left, then raise EOFError."""
        self.is_closed = True
        self._wake.set()
        self._taken.set()

    def discard(self) -> None:
        """Close, and drop what waits."""
        self._messages.clear()
        self.close()

    async def wait_room(self) -> None:
        """Wait until fewer messages wait than may."""
        while len(self._messages) >= MAX_MESSAGES and not self.is_closed:
            self._taken.clear()
            await self._taken.wait()

    async def take(self) -> list[Any]:
        """Wait for messages, or a `wake`, and take all of them.

        Raises: EOFError once closed and empty.
        """
        await self._wake.wait()
        if self.is_closed:
            if not self._messages:
                raise EOFError("the outbox is closed")
        else:
            self._wake.clear()
        messages, self._messages = self._messages, []
        self._taken.set()
        return messages


async def write(context: grpc.aio.ServicerContext, message: Any) -> None:
    """Write a message to a stream.

    Raises: UnavailableError if the other side does not read.
    """
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(message)
    except TimeoutError:
        raise UnavailableError(
            f"nothing of this stream was read for {WRITE_TIMEOUT_S:g} s; open it again",
            reason="SLOW_READER",
        ) from None
