"""/metrics over HTTP, served by the event loop of the process that counts.

There is no thread: what is counted changes only between two events, so a scrape sees one moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from shared.errors import ConfigError
from shared.metrics.samples import Samples

if TYPE_CHECKING:
    from shared.metrics.exposition import Exposition

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_MAX_HEAD_BYTES = 8192
_MAX_CONNECTIONS = 16


class MetricsServer:
    """An HTTP server that knows /metrics.

    Args:
        role: orchestrator, target or draft.
        source: Returns the samples of this moment.
        engine_pid: Returns the process of the engine, whose memory and CPU time are told as well;
            None: there is none.
        port: 0 = serve nothing.
    """

    def __init__(
        self,
        role: str,
        source: Callable[[], Samples],
        *,
        host: str,
        port: int,
        engine_pid: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._arguments = (role, source, engine_pid)
        self._exposition: Exposition | None = None

    @property
    def url(self) -> str:
        """Return where the metrics are; empty: nowhere."""
        return f"http://{self._host}:{self._port}/metrics" if self._server is not None else ""

    async def start(self) -> None:
        """Listen, if there is a port.

        Raises: ConfigError if the address cannot be listened on.
        """
        if not self._port:
            return
        from shared.metrics.exposition import Exposition

        self._exposition = Exposition(*self._arguments)
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host.strip("[]") or None, self._port, limit=_MAX_HEAD_BYTES
            )
        except (OSError, OverflowError) as error:  # the latter of a port past 65535
            cause = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot serve metrics on {self._host}:{self._port}: {cause}; "
                "choose another --metrics-port, or 0 for none"
            ) from None
        logger.info("metrics are at %s", self.url)

    async def close(self) -> None:
        """Stop listening, and end what is under way."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for writer in self._writers:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if len(self._writers) > _MAX_CONNECTIONS:
                return
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever that was has gone, or is not one that scrapes
        finally:
            self._writers.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "text/plain", b"GET /metrics\n")
        if path != "/metrics":
            return _response("404 Not Found", "text/plain", b"what there is: /metrics\n")
        assert self._exposition is not None
        body, content_type = self._exposition.text(_header(lines[1:], "accept"))
        return _response("200 OK", content_type, body, has_body=method == "GET")


def _header(lines: Iterable[str], name: str) -> str:
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() == name:
            return value.strip()
    return ""


def _response(status: str, content_type: str, body: bytes, *, has_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if has_body else b"")
