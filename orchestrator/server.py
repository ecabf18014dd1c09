"""The orchestrator process: worker sessions, the public server, an orderly end."""

from __future__ import annotations

import asyncio
import logging
import sys

from coppice.v1 import generation_pb2_grpc as pb_grpc
from orchestrator.admission import Admission
from orchestrator.endpoints import Lookup, WorkerEndpoints, lookup, parse_endpoints
from orchestrator.pool import WorkerPool
from orchestrator.processes import EXIT_CONFIG, run_processes
from orchestrator.service import GenerationService
from orchestrator.tokenizer import Tokenizer
from orchestrator.workers import DRAFT, TARGET
from shared.config import OrchestratorConfig
from shared.errors import ConfigError
from shared.memory import return_large_buffers, settle_garbage
from shared.models.checkpoint import resolve_model, tokenizer_hash
from shared.rpc.health_names import process_name
from shared.rpc.server import RpcServer

logger = logging.getLogger(__name__)

LISTEN_WITHIN_S = 5.0
"""How long a process that shares its port waits for a target before it listens."""

SERVICE = "coppice.v1.GenerationService"
SPECULATION = "coppice.v1.GenerationService/speculation"
"""Health name: SERVING while some draft fits some target."""


class Orchestrator:
    """Everything that runs in an orchestrator process.

    Args:
        lookup: Finds the addresses of a worker's name.
        parent_pid: Of the process that shares the port among several orchestrators; 0: none does.
    Raises: ConfigError if the configuration cannot work.
    """

    def __init__(
        self, config: OrchestratorConfig, *, lookup: Lookup = lookup, parent_pid: int = 0
    ) -> None:
        targets = parse_endpoints(config.targets, option="--targets")
        drafts = parse_endpoints(config.drafts, option="--drafts")
        if not targets:
            raise ConfigError("there is no target worker; name at least one with --targets")
        directory = resolve_model(config.model, "target")
        path = directory / "tokenizer.json"
        tokenizer = Tokenizer(path) if path.is_file() else None
        if tokenizer is None:
            logger.warning("%s has no tokenizer.json: token ids only, no text", directory)
        self._changed = asyncio.Event()
        self.admission = Admission(config.max_num_requests)
        self.pool = WorkerPool(
            tokenizer_hash=tokenizer_hash(directory), on_change=self._changed.set
        )
        self._endpoints = [
            WorkerEndpoints(
                role,
                endpoints,
                resolve_interval_s=config.resolve_interval_s,
                on_open=on_open,
                on_lost=self.pool.lose,
                lookup=lookup,
            )
            for role, endpoints, on_open in (
                (TARGET, targets, self.pool.open_target),
                (DRAFT, drafts, self.pool.open_draft),
            )
        ]
        self._server = RpcServer(
            services=[SERVICE],
            host=config.host,
            port=config.port,
            max_message_bytes=config.max_message_bytes,
            drain_timeout_s=config.drain_timeout_s,
            on_drain=self.admission.drain,
            shares_port=bool(parent_pid),
        )
        self._parent_pid = parent_pid
        pb_grpc.add_GenerationServiceServicer_to_server(
            GenerationService(
                config, pool=self.pool, admission=self.admission, tokenizer=tokenizer
            ),
            self._server.grpc_server,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Listen and begin to look for workers; ready once a target is.

        Returns: the port.
        """
        self._tasks = [asyncio.create_task(endpoints.run()) for endpoints in self._endpoints]
        if self._parent_pid:
            await self._prepare_shared_port()
        port = await self._server.start()
        self._tasks.append(asyncio.create_task(self._follow_health()))
        logger.info("listening on port %d", port)
        return port

    async def serve_until_stopped(self) -> None:
        """Serve until SIGTERM, SIGINT or `request_stop`; then let running requests end."""
        self._server.install_signal_handlers()
        stopped = asyncio.create_task(self._server.serve_until_stopped())
        done, _ = await asyncio.wait([stopped, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        try:
            for task in done:
                task.result()  # a background task ends only by a bug: end the process
        finally:
            await self.stop()

    @property
    def is_draining(self) -> bool:
        """Return whether the server lets running requests end and takes no new ones."""
        return self._server.is_draining

    def request_stop(self) -> None:
        """Make `serve_until_stopped` drain and return."""
        self._server.request_stop()

    async def stop(self) -> None:
        """Stop at once; open calls end with UNAVAILABLE."""
        await self._server.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _prepare_shared_port(self) -> None:
        """Wait a while for a target: connections come here as soon as this process listens."""
        await self._server.set_detail(process_name(self._parent_pid), is_serving=True)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LISTEN_WITHIN_S
        while not self.pool.is_ready and loop.time() < deadline:
            await asyncio.sleep(0.02)

    async def _follow_health(self) -> None:
        while True:
            await self._server.set_ready(ready=self.pool.is_ready)
            await self._server.set_detail(SPECULATION, is_serving=self.pool.can_speculate)
            await self._changed.wait()
            self._changed.clear()


async def serve(config: OrchestratorConfig, *, parent_pid: int = 0) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        parent_pid: Of the process that shares the port among several orchestrators; 0: none does.
    Raises: ConfigError if the configuration cannot work.
    """
    return_large_buffers()
    orchestrator = Orchestrator(config, parent_pid=parent_pid)
    await orchestrator.start()
    settle_garbage()
    await orchestrator.serve_until_stopped()


def main(config: OrchestratorConfig) -> int:
    """Run the orchestrator, in this process or in several.

    Returns: exit code: 0 after an orderly end, 2 for a configuration that cannot work.
    """
    if config.workers == 1:
        return _run(config, 0)
    try:
        return run_processes(config, _run)
    except ConfigError as error:
        return _refuse(error)


def _run(config: OrchestratorConfig, parent_pid: int) -> int:
    try:
        asyncio.run(serve(config, parent_pid=parent_pid))
    except ConfigError as error:
        return _refuse(error)
    return 0


def _refuse(error: ConfigError) -> int:
    sys.stderr.write(f"orchestrator: {error}\n")
    return EXIT_CONFIG
