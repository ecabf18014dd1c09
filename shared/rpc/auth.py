"""Server interceptor: who calls proves it once per call, and the handler knows the name.

Health checks are open to everybody: probes have no identity. Whatever else a server offers,
reflection included, is not.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health

from shared.errors import UnauthenticatedError
from shared.rpc.interceptors import handler_like

_OPEN_PREFIX = f"/{health.SERVICE_NAME}/"
_NAME: contextvars.ContextVar[str] = contextvars.ContextVar("caller_name", default="")
_COMMON_NAME = "x509_common_name"


class IdentityCheck(Protocol):
    """What tells callers from others."""

    def check(self, method: str, authorization: str | None) -> str:
        """Return the caller's name, "" if it has none.

        Args:
            method: /PACKAGE.SERVICE/METHOD.
            authorization: The metadata of this name; None: there is none, or more than one.
        Raises: UnauthenticatedError.
        """


def caller_name(context: grpc.aio.ServicerContext) -> str:
    """Return who calls: the name of the token, else that in the certificate, else ""."""
    names = context.auth_context().get(_COMMON_NAME, ())
    name = next((name.decode(errors="replace") for name in names), "")
    return _NAME.get() or (name if name.isprintable() else repr(name))


class IdentityInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls with UNAUTHENTICATED; stands inside of the ErrorInterceptor.

    Args:
        check: Of all methods but health checks.
    """

    def __init__(self, check: IdentityCheck) -> None:
        self._check = check

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Check the caller before the handler sees anything of the call."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(_OPEN_PREFIX):
            return handler
        try:
            _NAME.set(self._check.check(method, _authorization_of(handler_call_details)))
        except UnauthenticatedError as error:
            return _refusal(handler, error)
        return handler


def _refusal(handler: Any, error: UnauthenticatedError) -> Any:
    """Return a handler of the same kind that reads nothing and raises."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> NoReturn:
        raise error

    return handler_like(handler, refuse, bytes)


def _authorization_of(details: grpc.HandlerCallDetails) -> str | None:
    values = [
        value if isinstance(value, str) else value.decode(errors="replace")
        for key, value in details.invocation_metadata or ()
        if key == "authorization"
    ]
    return values[0] if len(values) == 1 else None
