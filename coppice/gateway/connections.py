"""Connections of HTTP clients: how many there may be, and how long one may do nothing.

    more than the limit            closed at once; so is one of an address that has its half
    no whole head in time          closed: before the first request, and between two
    an answer that nobody reads    aborted: a close would wait for what the client does not take

uvicorn itself has a timer only between two requests, and it ends with their first byte.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from coppice.gateway.proxies import TrustedProxies

# Files of the process that are no connections of clients.
_OTHER_FILES = 256
# Connections beyond the limit that are still told so (503) if they ask for anything.
NUM_TOLD = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of a server, and what it counts for them.

    Args:
        connections: At most; one address may have half of them.
        proxies: May have all of them.
        read_timeout_s: Seconds for a request's head, and for reading what was answered.
        num_of_address: Open connections.
    """

    connections: int
    proxies: TrustedProxies
    read_timeout_s: float
    num_of_address: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, most: int, *, read_timeout_s: float, proxies: TrustedProxies) -> ConnectionLimits:
        """Return the limits of this process: fewer if it may not open so many files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            most = min(most, max(files - _OTHER_FILES - NUM_TOLD, files // 2))
        return cls(connections=most, proxies=proxies, read_timeout_s=read_timeout_s)


class Connection(H11Protocol):
    """A connection of a client."""

    def __init__(self, *, limits: ConnectionLimits, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._answer = self.app
        self.app = self._answer_or_abort
        self._address = ""
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it without a word if there are too many."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._limits.num_of_address[self._address] += 1
        most = self._limits.connections
        is_share = self._limits.num_of_address[self._address] <= max(1, most // 2)
        may_stay = is_share or self._address in self._limits.proxies
        if may_stay and len(self.connections) <= most + NUM_TOLD:
            self._watch_head()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_head_timer()
        self._stop_unread_timer()
        self._unset_keepalive_if_required()
        counts = self._limits.num_of_address
        counts[self._address] -= 1
        if not counts[self._address]:
            del counts[self._address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a head must all come in time."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._watch_head()
        else:
            self._stop_head_timer()
            if not self.flow.write_paused:
                self._stop_unread_timer()

    def on_response_complete(self) -> None:
        """Go on with the next request; what was answered must be read in time."""
        super().on_response_complete()
        self._watch_unread()

    def pause_writing(self) -> None:
        """Let an answer wait for its reader, who must read some of it in time."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """Go on with an answer: much of it was read."""
        super().resume_writing()
        self._stop_unread_timer()
        if self.cycle is None or self.cycle.response_complete:
            self._watch_unread()

    async def _answer_or_abort(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request; without a whole answer the connection is of no use."""
        cycle = self.cycle  # the next one may begin before this one returns
        await self._answer(scope, receive, send)
        if not cycle.response_complete:
            self.transport.abort()

    def _watch_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            timeout_s = self._limits.read_timeout_s
            self._head_timer = self.loop.call_later(timeout_s, self.transport.abort)

    def _watch_unread(self) -> None:
        num_unread = self.transport.get_write_buffer_size()
        if num_unread and self._unread_timer is None:
            self._unread_timer = self.loop.call_later(
                self._limits.read_timeout_s, self._check_unread, num_unread
            )

    def _check_unread(self, num_before: int) -> None:
        """Abort unless some of the answer was read since."""
        self._unread_timer = None
        if self.transport.get_write_buffer_size() >= num_before:
            self.transport.abort()
        else:
            self._watch_unread()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
