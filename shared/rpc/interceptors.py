"""Server interceptor: what a handler raises becomes a gRPC status with google.rpc details.

So does a message that cannot be read: gRPC alone would call that UNKNOWN.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from shared.errors import CoppiceError, InternalError, InvalidArgumentError
from shared.rpc.status import abort

logger = logging.getLogger(__name__)

REFUSAL_REASONS = (
    *("NO_IDENTITY", "WRONG_IDENTITY", "EXPIRED_IDENTITY"),
    *("TOO_MANY_CALLS", "MALFORMED_MESSAGE"),
)
"""Why a call is turned away before its handler has seen anything of it."""
_LOG_INTERVAL_S = 10.0
_PASS = (grpc.aio.AbortError, grpc.aio.UsageError)
_CANCELLED_WITHIN_S = 5.0
# A status leaves at once, unless its client has not read what came before it.
_LINGER_S = 5.0
_ENDING: set[asyncio.Future[NoReturn]] = set()
"""Calls whose clients have not read what comes before their status."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turn CoppiceError into its status and anything else into INTERNAL, logged once.

    Cancellation is no error: it passes through untouched.
    """

    def __init__(self) -> None:
        self.refusals = Counter(dict.fromkeys(REFUSAL_REASONS, 0))
        """Calls turned away, by reason."""
        self._logged_at = -_LOG_INTERVAL_S

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler that serves the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        check = _readable_stream if handler.request_streaming else _readable
        handle = behavior_of(handler)
        is_generator = inspect.isasyncgenfunction(handle)
        wrap = _wrap_generator if is_generator else _wrap
        wrapped = wrap(handle, check, handler_call_details.method, self._note_refusal)
        if handler.response_streaming and not is_generator:
            wrapped = _wrap_writer(wrapped)
        return handler_like(handler, wrapped, _tolerant(handler.request_deserializer))

    def _note_refusal(self, method: str, peer: str, error: CoppiceError) -> None:
        """Count a call that is turned away; whoever knocks again and again fills no log."""
        if error.reason not in self.refusals:
            return
        self.refusals[error.reason] += 1
        now = time.monotonic()
        if now < self._logged_at + _LOG_INTERVAL_S:
            return
        logger.warning(
            "refused %s from %s: %s (%d refused in all)",
            *(method, peer, error.reason, self.refusals.total()),
        )
        self._logged_at = now


def behavior_of(handler: Any) -> Callable[..., Any]:
    """Return the function of a handler that serves its calls."""
    behavior: Callable[..., Any] = getattr(handler, _kind_of(handler))
    return behavior


def handler_like(handler: Any, behavior: Callable[..., Any], deserialize: Any) -> Any:
    """Return a handler of the same kind that another function serves."""
    make_handler = getattr(grpc, f"{_kind_of(handler)}_rpc_method_handler")
    return make_handler(behavior, deserialize, handler.response_serializer)


def _kind_of(handler: Any) -> str:
    """Return unary_unary, unary_stream, .."""
    streaming = (handler.request_streaming, handler.response_streaming)
    return "_".join("stream" if is_stream else "unary" for is_stream in streaming)


def _wrap(
    behavior: Callable[..., Any],
    check: Callable[[Any], Any],
    method: str,
    note_refusal: Callable[[str, str, CoppiceError], None],
) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behavior(check(request), context)
        except _PASS:
            raise
        except grpc.aio.InternalError:
            await _wait_cancelled()
            raise
        except Exception as error:
            known = _known(error, method)
        del request
        note_refusal(method, context.peer(), known)
        await _end(context, known)

    return call


def _wrap_writer(behavior: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await behavior(request, _Writing(context))

    return call


def _wrap_generator(
    behavior: Callable[..., Any],
    check: Callable[[Any], Any],
    method: str,
    note_refusal: Callable[[str, str, CoppiceError], None],
) -> Callable[..., Any]:
    async def generate(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in behavior(check(request), context):
                yield response
            return
        except _PASS:
            raise
        except grpc.aio.InternalError:
            await _wait_cancelled()
            raise
        except Exception as error:
            known = _known(error, method)
        del request
        note_refusal(method, context.peer(), known)
        await _end(context, known)

    return generate


async def _wait_cancelled() -> None:
    """Wait for the cancellation that follows when a client goes away in the middle of a write.

    Such a write fails; that is no error of ours, and nobody is there to hear of it.
    """
    await asyncio.sleep(_CANCELLED_WITHIN_S)


async def _end(context: grpc.aio.ServicerContext, error: CoppiceError) -> NoReturn:
    """End the call with an error.

    A client that does not read gets it once it has read what was sent before. Nothing here waits
    for that, nor for one that is gone: the call is cancelled as far as its handler is concerned.
    """
    ending = asyncio.ensure_future(abort(context, error))
    _ENDING.add(ending)
    ending.add_done_callback(_note_ended)
    await asyncio.wait({ending}, timeout=_LINGER_S)
    if not ending.done() or isinstance(ending.exception(), grpc.aio.InternalError):
        raise asyncio.CancelledError
    await ending
    raise AssertionError("abort returned")


def _note_ended(ending: asyncio.Future[NoReturn]) -> None:
    _ENDING.discard(ending)
    if not ending.cancelled():
        ending.exception()  # which whoever waits has seen


class _Writing:
    """The context of a call whose handler writes and may be cancelled while it does.

    The first message takes the call's headers with it. Were its write cut off, gRPC would send
    them again with the status; that fails, and the client would never hear of the end.

    Attributes:
        write: Writes a message; a cancellation ends this, yet not the write of the first one.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._first: asyncio.Future[None] | None = None
        self.write = self._write_first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def _write_first(self, message: Any) -> None:
        self.write = self._context.write  # of all others
        self._first = asyncio.ensure_future(self._context.write(message))
        await asyncio.shield(self._first)

    async def abort_with_status(self, status: grpc.Status) -> None:
        """End the call with a status, after its first message."""
        if self._first is not None:
            await asyncio.wait({self._first})
        await self._context.abort_with_status(status)


class _Unreadable:
    """Stands for a message between its deserializer, which must not raise, and its handler."""

    def __init__(self, cause: DecodeError) -> None:
        self.cause = cause


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Unreadable(error)

    return read


def _readable(request: Any) -> Any:
    if isinstance(request, _Unreadable):
        raise InvalidArgumentError(
            f"these bytes are no message of this method: {request.cause}; "
            "make them from its .proto file",
            reason="MALFORMED_MESSAGE",
        )
    return request


async def _readable_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


def _known(error: Exception, method: str) -> CoppiceError:
    """Return what to tell the caller, without the frames that it comes from.

    gRPC keeps the exception of `abort` with the call in a circle; a request of megabytes that some
    frame holds would stay until the next full collection.
    """
    if isinstance(error, CoppiceError):
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    logger.error("%s failed", method, exc_info=error)
    return InternalError(f"{method} failed: {type(error).__name__}; the server's log says more")
