"""What waits to be written to one stream; many producers on the loop, one writer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


class Outbox:
    """A list of messages that grows until the writer takes all of it at once.

    That is what makes batches: while a write is under way, whatever arrives joins the next one.
    """

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._wake = asyncio.Event()
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
        return messages
