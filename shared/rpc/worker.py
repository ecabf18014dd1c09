"""A worker's life: lease a GPU, listen, load the model in the engine process, serve, drain, end.

start -> NOT_SERVING, engine loading -> SERVING <-> NOT_SERVING (engine stalls) -> draining -> end
the engine dies: the server stops at once and the process exits with code 1
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shared.config import WorkerConfig
from shared.errors import ConfigError
from shared.gpu_lease import lease_gpu
from shared.messages import WorkerInfo
from shared.rpc.engine import EngineDiedError, EngineHandle, EngineReport
from shared.rpc.engine_process import EngineProcess
from shared.rpc.identity import WorkerIdentity
from shared.rpc.server import RpcServer
from shared.rpc.sessions import SessionHub
from shared.rpc.startup_lines import announce, loading_line, ready_line

logger = logging.getLogger(__name__)

EXIT_ENGINE_DIED = 1
EXIT_CONFIG = 2


class WorkerServicer(Protocol):
    """What a worker needs of its role's servicer."""

    sessions: SessionHub

    def set_info(self, info: WorkerInfo) -> None:
        """Take note of what the engine is, before the service is SERVING."""

    def deliver(self, report: EngineReport) -> None:
        """Route what the engine answered."""

    async def close(self) -> None:
        """End whatever the servicer runs by itself."""


Register = Callable[[Any, WorkerIdentity, Callable[[Sequence[Any]], None]], WorkerServicer]


class WorkerServer:
    """One worker: server, engine and the task that carries reports between them.

    Args:
        role: "target" or "draft", for messages.
        service: Full gRPC service name.
        engine: Not started yet.
        register: (grpc server, identity, send) -> servicer.
    """

    def __init__(
        self,
        config: WorkerConfig,
        engine: EngineHandle,
        *,
        role: str,
        service: str,
        register: Register,
    ) -> None:
        self._config = config
        self._engine = engine
        self._role = role
        self._last_progress = time.monotonic()
        self.identity = WorkerIdentity()
        self.server = RpcServer(
            services=[service],
            host=config.host,
            port=config.port,
            drain_timeout_s=config.drain_timeout_s,
            on_drain=self._drain,
        )
        self.servicer = register(self.server.grpc_server, self.identity, self._send)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        """Return HOST:PORT as another process on this machine dials it."""
        return self.server.address

    async def start(self) -> None:
        """Listen, load the model, become ready.

        Raises: ConfigError or EngineDiedError; nothing is left running then.
        """
        began = time.monotonic()
        try:
            await self.server.start()
            info = await self._engine.start(self._show_progress)
        except BaseException:
            await self.close()
            raise
        self.servicer.set_info(info)
        self._tasks = [
            asyncio.create_task(self._carry_reports()),
            asyncio.create_task(self._watch_progress()),
        ]
        await self.server.set_ready(ready=True)
        announce(ready_line(self._role, self.address, info, time.monotonic() - began))

    async def serve(self) -> None:
        """Start and serve until SIGTERM or SIGINT, which also end a start that is under way.

        Raises: ConfigError, or EngineDiedError.
        """
        self.server.install_signal_handlers()
        starting = asyncio.create_task(self.start())
        stopping = asyncio.create_task(self.server.wait_stop_requested())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        starting.result()
        await self.run()

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `server.request_stop`, drain, and end the engine.

        Raises: EngineDiedError if the engine dies first.
        """
        stopped = asyncio.create_task(self.server.serve_until_stopped())
        try:
            await asyncio.wait([stopped, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in (stopped, *self._tasks):
                if task.done():
                    task.result()
        finally:
            stopped.cancel()
            await self.close()

    async def close(self) -> None:
        """Stop everything at once; open calls end with UNAVAILABLE."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.servicer.close()
        await self.server.stop(grace_s=0)
        await self._engine.close()

    def _send(self, messages: Sequence[Any]) -> None:
        if messages:
            if not self._engine.is_pending:
                self._last_progress = time.monotonic()
            self._engine.send(messages)

    async def _carry_reports(self) -> None:
        async for report in self._engine.outputs():
            self._last_progress = time.monotonic()
            self.identity.load = report.load
            self.servicer.deliver(report)

    async def _watch_progress(self) -> None:
        limit_s = self._config.stall_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            silent_s = time.monotonic() - self._last_progress
            is_stalled = self._engine.is_pending and silent_s > limit_s
            if is_stalled:
                logger.error("the engine made no progress for %.0f s", silent_s)
            await self.server.set_ready(ready=not is_stalled)

    async def _drain(self) -> None:
        self.servicer.sessions.is_draining = True
        await self.servicer.sessions.wait_idle()

    def _show_progress(self, stage: str, fraction: float = 0.0) -> None:
        announce(loading_line(self._role, stage, fraction))


def run_worker(
    config: WorkerConfig,
    *,
    role: str,
    factory: str,
    create_worker: Callable[[Any, EngineHandle], WorkerServer],
) -> int:
    """Run a worker process to its end.

    Args:
        factory: "module:function" of the engine.
        create_worker: Puts the front before an engine that is not started yet.
    Returns: exit code: 0 after an orderly end, 1 if the engine died, 2 for a configuration that
        cannot work.
    """

    async def serve(engine: EngineHandle) -> None:
        await create_worker(config, engine).serve()

    try:
        lease = lease_gpu(config, role=role)
        asyncio.run(serve(EngineProcess(factory, config, kept_fds=[lease.fd] if lease else [])))
    except ConfigError as error:
        sys.stderr.write(f"{role}: {error}\n")
        return EXIT_CONFIG
    except EngineDiedError as error:
        sys.stderr.write(f"{role}: {error}; its log is above\n")
        return EXIT_ENGINE_DIED
    return 0
