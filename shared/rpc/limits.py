"""How many connections and calls a server has at once; what is too many is refused.

    connections   refused by gRPC before anything is read of them
    streams       of a connection; a client's further calls wait on its side
    calls         of a server, and of one address half as many: RESOURCE_EXHAUSTED, with a delay

Health checks are always answered. Watches of health, and reflection, have limits of their own, so
that nobody takes the calls of others with them.
"""

from __future__ import annotations

import inspect
import random
import resource
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health

from shared.errors import ResourceExhaustedError
from shared.rpc.interceptors import behavior_of, handler_like

_CHECK = f"/{health.SERVICE_NAME}/Check"
_WATCH = f"/{health.SERVICE_NAME}/Watch"
_REFLECTION = "/grpc.reflection."
# Files of a process that are no connections of clients.
_OTHER_FILES = 256
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What a server takes at once.

    Args:
        connections: At most; fewer if the process may not open so many files.
        streams: Of one connection.
        calls: Of the server's own services.
        watches: Of its health.
        reflections: Calls of reflection.
    """

    connections: int = 4096
    streams: int = 1024
    calls: int = 1024
    watches: int = 256
    reflections: int = 16

    @property
    def options(self) -> list[tuple[str, int]]:
        """Return the options of a gRPC server."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            most = max(files - _OTHER_FILES, files // 2)
        else:
            most = self.connections
        return [
            ("grpc.max_allowed_incoming_connections", min(self.connections, most)),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.server_handshake_timeout_ms", 10_000),
        ]


class LimitInterceptor(grpc.aio.ServerInterceptor):
    """Counts calls and refuses what is too many; stands inside of the ErrorInterceptor."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._num_calls: Counter[str] = Counter()  # by kind
        self._num_of_peer: Counter[tuple[str, str]] = Counter()  # by kind and address

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Count the call as long as its handler runs."""
        handler = await continuation(handler_call_details)
        kind = _kind_of(handler_call_details.method)
        if handler is None or not kind:
            return handler
        handle = behavior_of(handler)
        wrap = self._counted_generator if inspect.isasyncgenfunction(handle) else self._counted
        return handler_like(handler, wrap(handle, kind), handler.request_deserializer)

    def _counted(self, handle: Callable[..., Any], kind: str) -> Callable[..., Any]:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with self._place(kind, context):
                return await handle(request, context)

        return call

    def _counted_generator(self, handle: Callable[..., Any], kind: str) -> Callable[..., Any]:
        async def generate(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            with self._place(kind, context):
                async for response in handle(request, context):
                    yield response

        return generate

    @contextmanager
    def _place(self, kind: str, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """Hold a place for a call.

        Raises: ResourceExhaustedError if there is none.
        """
        most = getattr(self._limits, kind)
        key = kind, _address_of(context.peer())
        if self._num_calls[kind] >= most or self._num_of_peer[key] >= max(1, most // 2):
            raise ResourceExhaustedError(
                f"this server has {self._num_calls[kind]} {kind} open, {self._num_of_peer[key]} of "
                f"them from this address; it takes {most}, of one address half as many. Close "
                "some, or try again later",
                reason="TOO_MANY_CALLS",
                retry_after_s=_RETRY_S * random.uniform(1.0, 2.0),
            )
        self._num_calls[kind] += 1
        self._num_of_peer[key] += 1
        try:
            yield
        finally:
            self._num_calls[kind] -= 1
            self._num_of_peer[key] -= 1
            if not self._num_of_peer[key]:
                del self._num_of_peer[key]


def _kind_of(method: str) -> str:
    """Return which limit a method has; "" = none."""
    if method == _CHECK:
        return ""
    if method == _WATCH:
        return "watches"
    return "reflections" if method.startswith(_REFLECTION) else "calls"


def _address_of(peer: str) -> str:
    """Return a peer, as in ipv4:10.0.0.1:4711, without its port."""
    return peer if peer.startswith("unix:") else peer.rpartition(":")[0]
