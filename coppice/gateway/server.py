"""The gateway process: HTTP for clients, gRPC health for probes, an orderly end.

Health over gRPC (--health-port) is the same as of every other service: "" = alive, the full name =
ready, "process/PID" = this process answers. /health says "ready" over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any, cast

import uvicorn

from coppice.gateway.app import Gateway
from coppice.gateway.connections import Connection, ConnectionLimits
from coppice.gateway.proxies import TrustedProxies
from coppice.gateway.tls import server_context
from coppice.gateway.upstreams import Upstreams
from shared.access.caller import dialled_tls
from shared.access.tokens import TokenCheck
from shared.config import GatewayConfig
from shared.errors import EXIT_CONFIG, ConfigError
from shared.memory import tended
from shared.metrics.server import MetricsServer
from shared.rpc.gate import Gate, front_gate, log_exposure
from shared.rpc.health_names import GATEWAY_SERVICE
from shared.rpc.server import RpcServer
from shared.watchdog import watched

logger = logging.getLogger(__name__)

_FOLLOW_INTERVAL_S = 0.1
_END_WITHIN_S = 2
_KEEP_ALIVE_S = 60
_BACKLOG = 2048
# Idle ones, beside those that are being answered; more are answered 503.
_MAX_CONNECTIONS = 4096
_ADDRESS = re.compile(r"[^/]+:\d{1,5}")
_FAMILIES = {True: socket.AF_INET6, False: socket.AF_INET}


class _HttpServer(uvicorn.Server):
    """Uvicorn without handlers of signals: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer:
    """Everything that runs in the gateway's process.

    Raises: ConfigError if the configuration cannot work.
    """

    def __init__(self, config: GatewayConfig) -> None:
        addresses = [part.strip() for part in config.orchestrators.split(",") if part.strip()]
        if not addresses:
            raise ConfigError("there is no orchestrator; name at least one with --orchestrators")
        for address in addresses:
            if not _ADDRESS.fullmatch(address):  # gRPC would try port 443
                raise ConfigError(
                    f"--orchestrators holds {address!r}, expected HOST:PORT[,HOST:PORT...]"
                )
        gate = front_gate(config)
        log_exposure(config, gate)
        self._config = config
        self._tls = server_context(config)
        self._proxies = TrustedProxies(config.trusted_proxies)
        self.upstreams = Upstreams(
            addresses,
            tls=dialled_tls(config, cert_file=config.tls_cert_file, key_file=config.tls_key_file),
            num_connections=config.num_connections,
        )
        check = gate.check if isinstance(gate.check, TokenCheck) else None
        self.gateway = Gateway(config, self.upstreams, check)
        self._health = RpcServer(
            services=[GATEWAY_SERVICE],
            host=config.host,
            port=config.health_port,
            drain_timeout_s=config.drain_timeout_s + _END_WITHIN_S,
            on_drain=self.gateway.drain,
            gate=Gate(has_reflection=False),
        )
        self._metrics = MetricsServer(
            "gateway",
            self.gateway.samples,
            host=config.metrics_host,
            port=config.metrics_port,
        )
        self._http: _HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Listen, and look whether orchestrators are ready.

        Returns: the port.
        """
        listening = _listen(self._config.host, self._config.port)
        port = int(listening.getsockname()[1])
        limits = ConnectionLimits.of(
            _MAX_CONNECTIONS + self._config.max_num_requests,
            read_timeout_s=self._config.read_timeout_s,
            proxies=self._proxies,
        )
        config = uvicorn.Config(
            self.gateway.app,
            http=cast(Any, functools.partial(Connection, limits=limits)),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(self._proxies),
            forwarded_allow_ips=self._proxies.names,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_END_WITHIN_S,
            backlog=_BACKLOG,
            limit_concurrency=limits.connections,
        )
        config.load()
        config.ssl = self._tls
        self._http = _HttpServer(config)
        self._tasks = [
            asyncio.create_task(self.upstreams.follow_health()),
            asyncio.create_task(self._http.serve(sockets=[listening])),
            asyncio.create_task(self._follow_readiness()),
        ]
        await self._metrics.start()
        if self._config.health_port:
            await self._health.start()
        logger.info("listening on port %d, HTTP%s", port, "S" if self._tls is not None else "")
        return port

    async def serve_until_stopped(self) -> None:
        """Serve until SIGTERM, SIGINT or `request_stop`; then let running requests end."""
        self._health.install_signal_handlers()
        try:
            await self._health.serve_until_stopped(*self._tasks)
        finally:
            await self.stop()

    def request_stop(self) -> None:
        """Make `serve_until_stopped` drain and return."""
        self._health.request_stop()

    async def stop(self) -> None:
        """Stop at once."""
        if self._http is not None:
            self._http.should_exit = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * _END_WITHIN_S):
                    await asyncio.shield(self._tasks[1])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._config.health_port:
            await self._health.stop()
        await self._metrics.close()
        await self.upstreams.close()

    async def _follow_readiness(self) -> None:
        while True:
            await self._health.set_ready(ready=self.gateway.is_ready)
            await asyncio.sleep(_FOLLOW_INTERVAL_S)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens: who connects from now on waits for an answer.

    Raises: ConfigError if the address cannot be listened on.
    """
    bare = host.strip("[]") or "0.0.0.0"
    # asyncio turns Nagle's algorithm off for sockets that say their protocol.
    bound = socket.socket(_FAMILIES[":" in bare], socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((bare, port))
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        taken = "; is the port taken? choose another one, or 0 for any"
        hint = taken if error.errno == errno.EADDRINUSE else f": {error.strerror}"
        raise ConfigError(f"cannot listen on {host}:{port}{hint}") from None
    return bound


async def serve(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises: ConfigError if the configuration cannot work.
    """
    server = GatewayServer(config)
    await server.start()
    await server.serve_until_stopped()


def main(config: GatewayConfig) -> int:
    """Run the gateway.

    Returns: exit code: 0 after an orderly end, 2 for a configuration that cannot work.
    """
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # errors of requests are logged here
    try:
        asyncio.run(watched(tended(serve(config))))
    except ConfigError as error:
        sys.stderr.write(f"gateway: {error}\n")
        return EXIT_CONFIG
    return 0
