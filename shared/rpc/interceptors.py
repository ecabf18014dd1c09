"""Server interceptor: what a handler raises becomes a gRPC status with google.rpc details.

So does a message that cannot be read: gRPC alone would call that UNKNOWN.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from shared.errors import CoppiceError, InternalError, InvalidArgumentError
from shared.rpc.status import abort

logger = logging.getLogger(__name__)

_PASS = (grpc.aio.AbortError, grpc.aio.UsageError)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turn CoppiceError into its status and anything else into INTERNAL, logged once.

    Cancellation is no error: it passes through untouched.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler that serves the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        wrap = _wrap_streaming if handler.response_streaming else _wrap_unary
        kind = f"{_word(handler.request_streaming)}_{_word(handler.response_streaming)}"
        check = _readable_stream if handler.request_streaming else _readable
        behavior = wrap(getattr(handler, kind), check, method)
        make_handler = getattr(grpc, f"{kind}_rpc_method_handler")
        return make_handler(
            behavior,
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _word(is_streaming: bool) -> str:  # noqa: FBT001 - a fact about the handler, not an option
    return "stream" if is_streaming else "unary"


def _wrap_unary(
    behavior: Callable[..., Any], check: Callable[[Any], Any], method: str
) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behavior(check(request), context)
        except _PASS:
            raise
        except Exception as error:
            known = _known(error, method)
        del request
        await abort(context, known)

    return call


def _wrap_streaming(
    behavior: Callable[..., Any], check: Callable[[Any], Any], method: str
) -> Callable[..., Any]:
    async def write(request: Any, context: grpc.aio.ServicerContext) -> None:
        try:
            await behavior(check(request), context)
            return
        except _PASS:
            raise
        except Exception as error:
            known = _known(error, method)
        del request
        await abort(context, known)

    async def generate(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in behavior(check(request), context):
                yield response
            return
        except _PASS:
            raise
        except Exception as error:
            known = _known(error, method)
        del request
        await abort(context, known)

    return generate if inspect.isasyncgenfunction(behavior) else write


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
        logger.info("refused a message that cannot be read: %s", request.cause)
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
