"""Pickled messages over a socket pair: blocking on the engine's side, asyncio on the front's.

Frame: 8 bytes little-endian length, then one pickle (protocol 5). Neither side may wait for the
other's half-written frame, which is why this is not multiprocessing.Connection.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("<Q")
_RECEIVE_BYTES = 1024 * 1024
_READ_LIMIT = 8 * 1024 * 1024


def _encode(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=5)
    return b"".join((_HEADER.pack(len(body)), body))


class BlockingPipe:
    """The engine's end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._socket = sock
        self._buffer = bytearray()

    def send(self, message: Any) -> None:
        """Send one message; waits while the other end is behind.

        Raises: OSError if the other end is gone.
        """
        self._socket.sendall(_encode(message))

    def receive(self, *, wait: bool) -> list[Any]:
        """Take every complete message that has arrived.

        Args:
            wait: Block until there is at least one.
        Raises: EOFError if the other end is gone.
        """
        messages = self._decode()
        while True:
            flags = 0 if wait and not messages else socket.MSG_DONTWAIT
            try:
                data = self._socket.recv(_RECEIVE_BYTES, flags)
            except BlockingIOError:
                return messages
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError("the other end of the pipe is closed")
            self._buffer += data
            messages += self._decode()

    def _decode(self) -> list[Any]:
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


class AsyncPipe:
    """The front's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, sock: socket.socket) -> AsyncPipe:
        """Attach one end of a socket pair to the running loop."""
        sock.settimeout(0)
        return cls(*await asyncio.open_connection(sock=sock, limit=_READ_LIMIT))

    def send(self, message: Any) -> None:
        """Queue one message; never blocks, and says nothing if the other end is gone."""
        if not self._writer.is_closing():
            self._writer.write(_encode(message))

    async def receive(self) -> Any:
        """Wait for one message.

        Raises: EOFError if the other end is gone.
        """
        try:
            (length,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            return pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the other end of the pipe is closed") from error

    def close(self) -> None:
        """Close this end; the other one reads EOF."""
        self._writer.close()
