"""TCP connections that a test may reset, hold up, or delay: proxies between services."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_CHUNK_BYTES = 1 << 16


class Link:
    """A proxy before one address.

    Args:
        upstream: HOST:PORT to which connections go on.
    """

    def __init__(self, upstream: str, loop: asyncio.AbstractEventLoop) -> None:
        self._host, _, port = upstream.rpartition(":")
        self._port = int(port)
        self._loop = loop
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def listen(self) -> None:
        """Open a port of its own."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def reset(self) -> None:
        """Break every connection; new ones may be made at once."""
        self._loop.call_soon_threadsafe(self._reset)

    def block(self) -> None:
        """Let nothing through, as a network that has lost a host: neither data nor an end."""
        self._loop.call_soon_threadsafe(self._is_open.clear)

    def unblock(self) -> None:
        """Let everything through; what was held up arrives now, as if it had been sent again."""
        self._loop.call_soon_threadsafe(self._is_open.set)

    def _reset(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        try:
            await self._is_open.wait()
            back_reader, back_writer = await asyncio.open_connection(self._host, self._port)
            ends.add(back_writer)
            self._writers |= ends
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, back_writer))
                pumps.create_task(self._pump(back_reader, writer))
            for end in ends:
                end.close()
        except BaseException as error:  # an end is gone, or the test is over
            for end in ends:
                end.transport.abort()
            if not isinstance(error, OSError | ExceptionGroup):
                raise
        finally:
            self._writers -= ends

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self._is_open.wait()
            writer.write(data)
            await writer.drain()
        await self._is_open.wait()
        if writer.can_write_eof():
            writer.write_eof()


class Links:
    """The proxies of a test, in one thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._links: list[Link] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()

    def to(self, upstream: str) -> Link:
        """Return a new proxy before HOST:PORT."""
        link = Link(upstream, self._loop)
        self._run(link.listen())
        self._links.append(link)
        return link

    def close(self) -> None:
        """End all connections and the thread."""
        self._run(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)

    async def _cancel_all(self) -> None:
        for link in self._links:
            link.close()
        await asyncio.sleep(0)  # who was accepted just now is served: it ends what it has
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def tcp_links() -> Iterator[Links]:
    """Yield proxies that end with the block."""
    links = Links()
    try:
        yield links
    finally:
        links.close()
