"""Server interceptor: what a handler raises becomes a gRPC status with google.rpc details."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from shared.errors import CoppiceError, InternalError
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
        behavior = wrap(getattr(handler, kind), method)
        make_handler = getattr(grpc, f"{kind}_rpc_method_handler")
        return make_handler(
            behavior,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _word(is_streaming: bool) -> str:  # noqa: FBT001 - a fact about the handler, not an option
    return "stream" if is_streaming else "unary"


def _wrap_unary(behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behavior(request, context)
        except _PASS:
            raise
        except Exception as error:
            await abort(context, _known(error, method))

    return call


def _wrap_streaming(behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def write(request: Any, context: grpc.aio.ServicerContext) -> None:
        try:
            await behavior(request, context)
        except _PASS:
            raise
        except Exception as error:
            await abort(context, _known(error, method))

    async def generate(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in behavior(request, context):
                yield response
        except _PASS:
            raise
        except Exception as error:
            await abort(context, _known(error, method))

    return generate if inspect.isasyncgenfunction(behavior) else write


def _known(error: Exception, method: str) -> CoppiceError:
    if isinstance(error, CoppiceError):
        return error
    logger.error("%s failed", method, exc_info=error)
    return InternalError(f"{method} failed: {type(error).__name__}; the server's log says more")
