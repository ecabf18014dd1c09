"""Pickled messages over a socket pair: blocking on the engine's side, asyncio on the front's.

Frame: 8 bytes little-endian length, then one pickle (protocol 5). Neither side may wait for the
other's half-written frame, which is why this is not multiprocessing.Connection.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import io
import math
import pickle
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

_HEADER = struct.Struct("<Q")
_RECEIVE_BYTES = 1024 * 1024


class _Reducers(dict[type, Callable[[Any], tuple[Any, ...]]]):
    """How to pickle the values of a dataclass, in a third of the time that its own way takes."""

    def __missing__(self, cls: type) -> Callable[[Any], tuple[Any, ...]]:
        is_all_slots = dataclasses.is_dataclass(cls) and cls.__dictoffset__ == 0
        names = [field.name for field in dataclasses.fields(cls)] if is_all_slots else []
        if len(names) < 2:  # of one name attrgetter makes no tuple
            raise KeyError(cls)
        values_of = attrgetter(*names)
        self[cls] = reduce = lambda value: (_restore, (cls, *values_of(value)))
        return reduce


_REDUCERS = _Reducers()


def _restore(cls: type, *values: Any) -> Any:
    restored: Any = object.__new__(cls)
    for set_field, value in zip(_setters(cls), values, strict=True):
        set_field(restored, value)
    return restored


@functools.cache
def _setters(cls: type) -> tuple[Callable[[Any, Any], None], ...]:
    """Return the setters of a dataclass's slots, which work on a frozen one too."""
    return tuple(getattr(cls, field.name).__set__ for field in dataclasses.fields(cls))


def _encode(message: Any) -> bytes:
    frame = io.BytesIO()
    frame.write(bytes(_HEADER.size))
    pickler = pickle.Pickler(frame, protocol=5)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(message)
    with frame.getbuffer() as view:
        _HEADER.pack_into(view, 0, len(view) - _HEADER.size)
    return frame.getvalue()


class _Frames:
    """What has arrived of the frames that are not complete yet."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def decode(self, data: bytes) -> list[Any]:
        """Take bytes; return the messages that they complete."""
        self._buffer += data
        messages = []
        begin, end = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while end - begin >= _HEADER.size:
                (length,) = _HEADER.unpack_from(view, begin)
                first = begin + _HEADER.size
                if end - first < length:
                    break
                messages.append(pickle.loads(view[first : first + length]))
                begin = first + length
        del self._buffer[:begin]
        return messages


class BlockingPipe:
    """The engine's end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._socket = sock
        self._frames = _Frames()

    def send(self, message: Any) -> None:
        """Send one message; waits while the other end is behind.

        Raises: OSError if the other end is gone.
        """
        self._socket.sendall(_encode(message))

    def poll(self, timeout_s: float | None, others: Mapping[int, int]) -> bool:
        """Wait until there is something to receive, or the other end is gone, or time is up.

        Args:
            timeout_s: None: for ever.
            others: Descriptors that end the wait as well, and what they are waited for.
        """
        return bool(self._poller(others).poll(_milliseconds(timeout_s)))

    def spin(self, duration_s: float, others: Mapping[int, int]) -> bool:
        """Look for something to receive for so long, without sleeping; `others` as in `poll`.

        Returns: Whether there is something.
        """
        deadline = time.monotonic() + duration_s
        poller = self._poller(others)
        while not poller.poll(0):
            if time.monotonic() >= deadline:
                return False
        return True

    def receive(self) -> list[Any]:
        """Take every complete message that has arrived.

        Raises: EOFError if the other end is gone.
        """
        messages: list[Any] = []
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError("the other end of the pipe is closed")
            messages += self._frames.decode(data)

    def _poller(self, others: Mapping[int, int]) -> select.poll:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        for fd, events in others.items():
            poller.register(fd, events)
        return poller


def _milliseconds(duration_s: float | None) -> int | None:
    return None if duration_s is None else max(0, math.ceil(duration_s * 1e3))


class AsyncPipe(asyncio.Protocol):
    """The front's end; messages are decoded as they arrive, so that one wake-up takes them all."""

    def __init__(self) -> None:
        self._frames = _Frames()
        self._messages: collections.deque[Any] = collections.deque()
        self._has_news = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._is_over = False

    @classmethod
    async def connect(cls, sock: socket.socket) -> AsyncPipe:
        """Attach one end of a socket pair to the running loop."""
        sock.settimeout(0)
        _, pipe = await asyncio.get_running_loop().create_connection(cls, sock=sock)
        return pipe

    def send(self, message: Any) -> None:
        """Queue one message; never blocks, and says nothing if the other end is gone."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(_encode(message))

    async def receive(self) -> Any:
        """Wait for one message.

        Raises: EOFError if the other end is gone.
        """
        while not self._messages:
            if self._is_over:
                raise EOFError("the other end of the pipe is closed")
            self._has_news.clear()
            await self._has_news.wait()
        return self._messages.popleft()

    def close(self) -> None:
        """Close this end; the other one reads EOF."""
        assert self._transport is not None
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take note of the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take what has arrived."""
        self._messages += self._frames.decode(data)
        self._has_news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note of the end."""
        self._is_over = True
        self._has_news.set()
