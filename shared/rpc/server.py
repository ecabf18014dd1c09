"""The gRPC server of every Coppice service: health, reflection, errors, and an orderly end.

Health: "" = the process is alive, the full service name = ready for work, "process/PID" =
this process answers. On SIGTERM or SIGINT the
service turns NOT_SERVING, `on_drain` gets the drain budget to let its requests end, then the server
stops.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from shared.access.tls import ServerTls
from shared.errors import ConfigError
from shared.metrics.samples import Samples, counted
from shared.rpc.auth import IdentityInterceptor
from shared.rpc.channel import MAX_INTERNAL_MESSAGE_BYTES, server_options
from shared.rpc.gate import OPEN, Gate
from shared.rpc.health_names import process_name
from shared.rpc.interceptors import ErrorInterceptor
from shared.rpc.limits import LimitInterceptor, ServerLimits

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 0.5
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
WORKER_LIMITS = ServerLimits(connections=1024, streams=256, calls=256)
"""Sessions, feature streams and questions: a few of each orchestrator process and draft."""


async def _no_drain() -> None:
    return


class RpcServer:
    """One listening server; register servicers on `grpc_server`, then `start`.

    Args:
        services: Full names, e.g. "coppice.v1.TargetService"; not ready until `set_ready`.
        host: Address to listen on.
        port: Port to listen on; 0 = any free one.
        max_message_bytes: Largest message received.
        drain_timeout_s: Budget of `on_drain`, seconds.
        on_drain: Awaited once after the services turned NOT_SERVING; returns when nothing runs.
        shares_port: Other processes listen on the port as well.
        gate: What is asked of those who connect and call.
        limits: What it takes at once.
    """

    def __init__(
        self,
        *,
        services: Sequence[str],
        host: str,
        port: int,
        max_message_bytes: int = MAX_INTERNAL_MESSAGE_BYTES,
        drain_timeout_s: float = 20.0,
        on_drain: Callable[[], Awaitable[None]] = _no_drain,
        shares_port: bool = False,
        gate: Gate = OPEN,
        limits: ServerLimits = WORKER_LIMITS,
    ) -> None:
        self._services = tuple(services)
        self._host = host
        self._port = port
        self._drain_timeout_s = drain_timeout_s
        self._on_drain = on_drain
        self._health = health.aio.HealthServicer()
        self._stop_requested = asyncio.Event()
        self._is_ready: bool | None = None
        self.is_draining = False
        self._gate = gate
        identity = [IdentityInterceptor(gate.check)] if gate.check is not None else []
        errors = ErrorInterceptor()
        self._refusals = errors.refusals
        options = server_options(max_message_bytes=max_message_bytes, shares_port=shares_port)
        self.grpc_server = grpc.aio.server(
            interceptors=[errors, *identity, LimitInterceptor(limits)],
            options=[*options, *limits.options],
        )
        self._health_server = grpc.aio.server(options=options) if gate.health_port else None
        for server in filter(None, (self.grpc_server, self._health_server)):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if gate.has_reflection:
            names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self.grpc_server)
            _reflect_as_v1(names, self.grpc_server)

    @property
    def port(self) -> int:
        """Return the port that is listened on, once started."""
        return self._port

    @property
    def address(self) -> str:
        """Return HOST:PORT as another process on this machine dials it."""
        host = "127.0.0.1" if self._host in ("", "0.0.0.0", "[::]", "::") else self._host
        return f"{host}:{self._port}"

    @property
    def is_stopping(self) -> bool:
        """Return whether the end was asked for."""
        return self._stop_requested.is_set()

    @property
    def samples(self) -> Samples:
        """Return the named values of the server itself."""
        return {
            "coppice_ready": self.is_ready,
            **dict(counted("coppice_calls_refused_total", "reason", self._refusals)),
        }

    @property
    def is_ready(self) -> bool:
        """Return whether the services are SERVING."""
        return bool(self._is_ready)

    async def start(self) -> int:
        """Listen; the services answer NOT_SERVING until `set_ready(ready=True)`.

        Returns: the port.
        Raises: ConfigError if the address cannot be listened on.
        """
        await self.set_ready(ready=False)
        await self.set_detail(process_name(os.getpid()), is_serving=True)
        self._port = _listen(self.grpc_server, self._host, self._port, self._gate.tls)
        if self._health_server is not None:
            _listen(self._health_server, self._host, self._gate.health_port, None)
            await self._health_server.start()
        await self.grpc_server.start()
        return self._port

    async def set_ready(self, *, ready: bool) -> None:
        """Set the health of the services; while draining they stay NOT_SERVING."""
        ready = ready and not self.is_draining
        if ready == self._is_ready:
            return
        self._is_ready = ready
        status = health_pb2.HealthCheckResponse
        for name in self._services:
            await self._health.set(name, status.SERVING if ready else status.NOT_SERVING)

    async def set_detail(self, name: str, *, is_serving: bool) -> None:
        """Set the health of a name beside the services: of a part that may be missing."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    def install_signal_handlers(self) -> None:
        """Let SIGTERM and SIGINT request the end; a second Ctrl-C ends the process at once.

        SIGTERM may well come twice, from a supervisor and from a dying parent.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def request_stop(self) -> None:
        """Make `serve_until_stopped` drain and return."""
        self._stop_requested.set()

    async def wait_stop_requested(self) -> None:
        """Wait for `request_stop` or a signal."""
        await self._stop_requested.wait()

    async def serve_until_stopped(self, *background: asyncio.Task[None]) -> None:
        """Serve until `request_stop` or a signal, then drain.

        Args:
            background: Tasks that end only by a fault; then so does this, without draining. Of
                several that have ended the first one says why.
        """
        stopped = asyncio.create_task(self._drain_when_asked())
        tasks = [stopped, *background]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            stopped.cancel()

    async def _drain_when_asked(self) -> None:
        await self.wait_stop_requested()
        await self.drain()

    async def drain(self) -> None:
        """Turn NOT_SERVING, let requests end within the budget, stop."""
        self.is_draining = True
        await self.set_ready(ready=False)
        try:
            await asyncio.wait_for(self._on_drain(), self._drain_timeout_s)
        except TimeoutError:
            logger.warning("requests still run after %.1f s, stopping", self._drain_timeout_s)
        await self.stop()

    async def stop(self, *, grace_s: float = _STOP_GRACE_S) -> None:
        """Stop without draining; calls still open after the grace end with UNAVAILABLE."""
        await self.grpc_server.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop(0)

    def _on_signal(self, number: int) -> None:
        logger.info("received %s, draining", signal.Signals(number).name)
        self.request_stop()
        if number == signal.SIGINT:
            asyncio.get_running_loop().remove_signal_handler(number)


def _reflect_as_v1(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Answer reflection by its newer name, too; the messages are the same on the wire."""
    servicer = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_registered_method_handlers(_REFLECTION_V1, methods)


def _listen(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None) -> int:
    """Let a server listen; return the port.

    Raises: ConfigError if the address cannot be listened on.
    """
    address = f"{host}:{port}"
    cause: Exception | None = None
    bound = 0
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        cause = error
    if not bound:
        raise ConfigError(
            f"cannot listen on {address}; is the port taken? choose another one, or 0 for any"
        ) from cause
    return bound
