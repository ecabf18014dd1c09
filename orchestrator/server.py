"""The orchestrator process: worker sessions, the public server, an orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from coppice.v1 import generation_pb2_grpc as pb_grpc
from orchestrator.admin import AdminService
from orchestrator.admin_server import AdminServer
from orchestrator.admission import Admission
from orchestrator.endpoints import Lookup, WorkerEndpoints, lookup, parse_endpoints
from orchestrator.grammars import Grammars
from orchestrator.metrics import pool_samples
from orchestrator.model_card import read_model_card
from orchestrator.pool import WorkerPool
from orchestrator.processes import run_processes
from orchestrator.service import GenerationService
from orchestrator.siblings import Siblings
from orchestrator.tenants import TenantLimits
from orchestrator.timed_loop import TimedLoop, idle_clock
from orchestrator.tokenizer import Tokenizer
from orchestrator.workers import DRAFT, TARGET
from shared.access.caller import caller_of
from shared.config import OrchestratorConfig, served_name
from shared.errors import EXIT_CONFIG, ConfigError, UnavailableError
from shared.memory import settle_garbage, tended
from shared.metrics.samples import Samples
from shared.metrics.server import MetricsServer
from shared.models.checkpoint_names import resolve_model, tokenizer_hash
from shared.models.hub import fetch, is_hub_name
from shared.rpc.gate import front_gate, log_exposure
from shared.rpc.health_names import ORCHESTRATOR_SERVICE, SPECULATION_SERVICE, process_name
from shared.rpc.limits import ServerLimits
from shared.rpc.server import RpcServer
from shared.watchdog import watched

logger = logging.getLogger(__name__)

LISTEN_WITHIN_S = 5.0
"""How long a process that shares its port waits for a target before it listens."""


END_WITHIN_S = 1.0
"""How long clients may take to hear that their requests were ended by the end of the process."""


class Orchestrator:
    """Everything that runs in an orchestrator process.

    Args:
        lookup: Finds the addresses of a worker's name.
        siblings: Orchestrator processes that share the port; None: there are none.
    Raises: ConfigError if the configuration cannot work.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        lookup: Lookup = lookup,
        siblings: Siblings | None = None,
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
        caller, gate = caller_of(config, os.environ), front_gate(config)
        log_exposure(config, gate)
        self._changed = asyncio.Event()
        self.admission = Admission(
            config.max_num_requests, siblings, TenantLimits(config.max_requests_per_tenant)
        )
        self.pool = WorkerPool(
            tokenizer_hash=tokenizer_hash(directory),
            on_change=self._changed.set,
            num_by_tenant=self.admission.num_by_tenant,
            loads=siblings.loads if siblings is not None else None,
        )
        self._endpoints = [
            WorkerEndpoints(
                role,
                endpoints,
                resolve_interval_s=config.resolve_interval_s,
                on_open=on_open,
                on_lost=self.pool.lose,
                on_loading=self.pool.fates.note_loading,
                lookup=lookup,
                caller=caller,
            )
            for role, endpoints, on_open in (
                (TARGET, targets, self.pool.open_target),
                (DRAFT, drafts, self.pool.open_draft),
            )
        ]
        self._server = RpcServer(
            services=[ORCHESTRATOR_SERVICE],
            host=config.host,
            port=config.port,
            max_message_bytes=config.max_message_bytes,
            drain_timeout_s=config.drain_timeout_s + END_WITHIN_S,
            on_drain=self._drain,
            shares_port=siblings is not None,
            gate=gate,
            limits=ServerLimits(calls=config.max_calls or max(1024, 4 * config.max_num_requests)),
        )
        self._idle_s = idle_clock()
        self._siblings = siblings
        self._grammars = Grammars(directory)
        self._grammar_after_s = config.grammar_after_s
        service = GenerationService(
            config,
            pool=self.pool,
            admission=self.admission,
            tokenizer=tokenizer,
            card=read_model_card(
                directory,
                name=served_name(config),
                started_s=time.time(),
                chat_template=config.chat_template,
            ),
            grammars=self._grammars,
        )
        self._requests, self._tracing = service.metrics, service.tracing
        index = siblings.index if siblings is not None else 0
        self.metrics = MetricsServer(
            "orchestrator",
            self._samples,
            host=config.metrics_host,
            port=config.metrics_port and config.metrics_port + index,
        )
        pb_grpc.add_GenerationServiceServicer_to_server(service, self._server.grpc_server)
        self._running = service.running
        if config.vllm_engine:
            self._add_vllm_engine(config, service, directory)
        admin = AdminService(
            config,
            pool=self.pool,
            endpoints=self._endpoints,
            running=self._running,
            siblings=siblings,
        )
        self._admin = AdminServer(config, admin, siblings)
        self.admin_port = -1
        """Where operators are served once started; -1: nowhere."""
        self._drain_timeout_s = config.drain_timeout_s
        self._tasks: list[asyncio.Task[None]] = []
        self._preparing: list[asyncio.Task[None]] = []  # ends by itself

    def _add_vllm_engine(
        self, config: OrchestratorConfig, service: GenerationService, directory: Path
    ) -> None:
        """Serve gateways that speak vLLM's gRPC. Raises: ConfigError without their protos."""
        try:
            from smg_grpc_proto.generated import vllm_engine_pb2_grpc

            from orchestrator.vllm_engine import VllmEngine
        except ImportError:
            raise ConfigError(
                "--vllm-engine needs the messages of that service: pip install 'coppice[smg]'"
            ) from None
        engine = VllmEngine(
            config,
            service=service,
            pool=self.pool,
            admission=self.admission,
            directory=directory,
        )
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, self._server.grpc_server)

    async def start(self) -> int:
        """Listen and begin to look for workers; ready once a target is.

        Returns: the port.
        """
        self._tasks = [asyncio.create_task(endpoints.run()) for endpoints in self._endpoints]
        if self._siblings is not None:
            await self._prepare_shared_port(self._siblings.parent_pid)
        await self.metrics.start()
        port = await self._server.start()
        self.admin_port = await self._admin.start()
        self._tasks.append(asyncio.create_task(self._follow_health()))
        if self._grammar_after_s:
            preparing = self._grammars.prepare(lambda: self.pool.model, self._grammar_after_s)
            self._preparing.append(asyncio.create_task(preparing))
        logger.info("listening on port %d", port)
        return port

    async def serve_until_stopped(self) -> None:
        """Serve until SIGTERM, SIGINT or `request_stop`; then let running requests end."""
        self._server.install_signal_handlers()
        try:
            await self._server.serve_until_stopped(*self._tasks)
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
        await self.metrics.close()
        await self._admin.stop()
        await asyncio.to_thread(self._tracing.close)
        for task in (*self._tasks, *self._preparing):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._preparing, return_exceptions=True)
        await self._grammars.close()

    def _samples(self) -> Samples:
        """Return what /metrics says."""
        samples = {
            **self._server.samples,
            **pool_samples(self.pool, num_requests=self.admission.num_requests),
            **self._requests.samples,
        }
        if self._idle_s is not None:
            samples["coppice_event_loop_idle_seconds_total"] = self._idle_s()
        return samples

    async def _drain(self) -> None:
        """Let running requests end; those that take too long end so that clients resume them."""
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await self.admission.drain()
        except TimeoutError:
            logger.warning(
                "%d requests still run after %g s; their clients may resume them elsewhere",
                *(self.admission.num_requests, self._drain_timeout_s),
            )
            self._running.end_all(
                UnavailableError(
                    "the server shuts down; send the request again, with what was received as "
                    "resume_token_ids",
                    reason="DRAINING",
                )
            )
            await self.admission.drain()

    async def _prepare_shared_port(self, parent_pid: int) -> None:
        """Wait a while for a target: connections come here as soon as this process listens."""
        await self._server.set_detail(process_name(parent_pid), is_serving=True)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LISTEN_WITHIN_S
        while not self.pool.is_ready and loop.time() < deadline:
            await asyncio.sleep(0.02)

    async def _follow_health(self) -> None:
        while True:
            await self._server.set_ready(ready=self.pool.is_ready)
            await self._server.set_detail(SPECULATION_SERVICE, is_serving=self.pool.can_speculate)
            await self._changed.wait()
            self._changed.clear()


async def serve(config: OrchestratorConfig, *, siblings: Siblings | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        siblings: Orchestrator processes that share the port; None: there are none.
    Raises: ConfigError if the configuration cannot work.
    """
    orchestrator = Orchestrator(config, siblings=siblings)
    await orchestrator.start()
    settle_garbage()
    await orchestrator.serve_until_stopped()


def main(config: OrchestratorConfig) -> int:
    """Run the orchestrator, in this process or in several.

    Returns: exit code: 0 after an orderly end, 2 for a configuration that cannot work.
    """
    try:
        config = _fetched(config)
        return _run(config) if config.workers <= 1 else run_processes(config, _run)
    except ConfigError as error:
        return _refuse(error)


def _fetched(config: OrchestratorConfig) -> OrchestratorConfig:
    """Fetch a model that is named as on the Hub, but for its weights, and name its folder instead.

    Here: it may take longer than an event loop may stand still, and once for all processes.
    """
    if not is_hub_name(config.model):
        return config
    directory = fetch(config.model, with_weights=False)
    return replace(config, model=str(directory), served_model_name=served_name(config))


def _run(config: OrchestratorConfig, siblings: Siblings | None = None) -> int:
    try:
        with asyncio.Runner(loop_factory=TimedLoop) as runner:
            runner.run(watched(tended(serve(config, siblings=siblings))))
    except ConfigError as error:
        return _refuse(error)
    return 0


def _refuse(error: ConfigError) -> int:
    sys.stderr.write(f"orchestrator: {error}\n")
    return EXIT_CONFIG
