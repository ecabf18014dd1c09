"""How answers leave: JSON at once, or server-sent events as they come; and what ends that early.

the client goes away          the work is cancelled, and with it its requests on both workers
the client reads nothing      its connection ends after a while
an error before the first     its own HTTP status
an error after that           an event with the error, then [DONE]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Send

from coppice.gateway.answers import Answer
from coppice.gateway.errors import api_error
from coppice.gateway.outputs import Part
from shared.errors import CoppiceError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WAIT_S = 15.0
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_WAITING = b": waiting\n\n"
_DONE = b"data: [DONE]\n\n"
_EVENTS_HEAD = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientGoneError(Exception):
    """The client has closed its connection."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it if the client goes away.

    Raises: ClientGoneError, and what `work` raises.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_wait_gone(receive))
    try:
        await asyncio.wait([worker, watcher], return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGoneError
        return worker.result()
    finally:
        watcher.cancel()
        worker.cancel()
        await asyncio.gather(watcher, worker, return_exceptions=True)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def encode(value: Any) -> bytes:
    """Return JSON as it is sent."""
    return _ENCODER.encode(value).encode(errors="surrogatepass")


class EventStream:
    """Server-sent events of one answer.

    Args:
        headers: Of the answer, beside those of every stream.
        on_start: Called before the head is sent.
        ending: Returns what to say if the stream is cancelled; None: nothing.
    """

    def __init__(
        self,
        send: Send,
        *,
        headers: list[tuple[bytes, bytes]],
        on_start: Callable[[], None] = lambda: None,
        ending: Callable[[], CoppiceError | None] = lambda: None,
    ) -> None:
        self._send = send
        self._headers = [*_EVENTS_HEAD, *headers]
        self.ending = ending
        self._on_start = on_start
        self.has_started = False

    async def write(self, data: bytes, *, has_more: bool = True) -> None:
        """Send bytes, after the head if there was none yet."""
        if not self.has_started:
            self.has_started = True
            self._on_start()
            head = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await self._send(head)
        await self._send({"type": "http.response.body", "body": data, "more_body": has_more})

    async def event(self, value: Any) -> None:
        """Send one event."""
        await self.write(b"data: " + encode(value) + b"\n\n")

    async def fail(self, error: CoppiceError) -> str:
        """End with an error; return its code."""
        found = api_error(error)
        await self.event(found.body)
        await self.write(_DONE, has_more=False)
        return found.code or "error"


async def send_stream(
    stream: EventStream,
    parts: AsyncGenerator[Part, None],
    answer: Answer,
    *,
    has_usage: bool,
) -> str:
    """Send an answer in chunks.

    Returns: "", or the code of the error that ended it after its head was sent.
    Raises: CoppiceError while the head is not sent yet.
    """
    try:
        async with contextlib.aclosing(parts):
            first = await _first(parts, stream)
            await _send_part(stream, first, answer, has_usage=has_usage)
            async for part in parts:
                await _send_part(stream, part, answer, has_usage=has_usage)
        if has_usage:
            await stream.event(answer.usage_chunk())
    except CoppiceError as error:
        if not stream.has_started:
            raise
        return await stream.fail(error)
    except asyncio.CancelledError:
        reason = stream.ending()
        if stream.has_started and reason is not None:
            await stream.fail(reason)
        raise
    except Exception:
        if not stream.has_started:
            raise
        logger.exception("a stream failed")
        return await stream.fail(CoppiceError("the gateway failed; its log says why"))
    await stream.write(_DONE, has_more=False)
    return ""


async def _first(parts: AsyncGenerator[Part, None], stream: EventStream) -> Part:
    """Wait for the first part; say now and then that there is none yet, for proxies' sake."""
    coming = asyncio.ensure_future(anext(parts))
    try:
        while not (await asyncio.wait([coming], timeout=_WAIT_S))[0]:
            await stream.write(_WAITING)
        return coming.result()
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)


async def _send_part(stream: EventStream, part: Part, answer: Answer, *, has_usage: bool) -> None:
    answer.note(part)
    chunk = answer.chunk(part, has_usage=has_usage)
    if chunk is not None:
        await stream.event(chunk)
