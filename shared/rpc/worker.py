"""A worker's life: lease a GPU, listen, load the model in the engine process, serve, drain, end.

start -> NOT_SERVING, engine loading -> SERVING -> draining -> end
the engine dies, or hangs and is killed: the server stops at once, and begins anew with the spare
engine; where there is none yet, the process exits with code 1

A spare engine is a process that has imported everything and waits: it has no model and no GPU.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, get_args

from shared.config import WorkerConfig
from shared.errors import EXIT_CONFIG, ConfigError, UnavailableError
from shared.gpu_lease import lease_gpu
from shared.logs import note_worker_id
from shared.memory import tended
from shared.messages import WorkerInfo
from shared.metrics.samples import Samples, counted
from shared.metrics.server import MetricsServer
from shared.rpc.control import WorkerControl
from shared.rpc.engine import (
    EngineDiedError,
    EngineEnd,
    EngineHandle,
    EngineOrder,
    EnginePing,
    EngineReport,
)
from shared.rpc.engine_process import EngineProcess
from shared.rpc.engine_watch import EngineWatch
from shared.rpc.gate import log_exposure, worker_gate
from shared.rpc.identity import WorkerIdentity
from shared.rpc.server import RpcServer
from shared.rpc.sessions import SessionHub
from shared.rpc.startup_lines import announce, loading_line, ready_line
from shared.watchdog import watched

logger = logging.getLogger(__name__)

EXIT_ENGINE_DIED = 1
LOOK_INTERVAL_S = 0.5
# For an engine that hangs to write where its threads are.
_STACKS_S = 0.2


class WorkerServicer(Protocol):
    """What a worker needs of its role's servicer."""

    sessions: SessionHub

    def set_info(self, info: WorkerInfo) -> None:
        """Take note of what the engine is, before the service is SERVING."""

    def deliver(self, report: EngineReport) -> None:
        """Route what the engine answered."""

    async def close(self) -> None:
        """End whatever the servicer runs by itself."""

    def clean_up(self) -> None:
        """Remove what engines have left that were killed, as this one may have been; it is over."""


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
        self._look_interval_s = min(LOOK_INTERVAL_S, config.stall_timeout_s / 4)
        self._watch: EngineWatch | None = None
        self.engine_ends = no_engine_ends()
        """Engines of this process that have ended while they served, by why."""
        self.identity = WorkerIdentity()
        gate = worker_gate(config, os.environ)
        log_exposure(config, gate)
        self.server = RpcServer(
            services=[service],
            host=config.host,
            port=config.port,
            drain_timeout_s=config.drain_timeout_s,
            on_drain=self._drain,
            gate=gate,
        )
        self.metrics = MetricsServer(
            role,
            self._samples,
            host=config.metrics_host,
            port=config.metrics_port,
            engine_pid=lambda: engine.pid,
        )
        self.servicer = register(self.server.grpc_server, self.identity, self._send)
        self.control = WorkerControl(self, role=role, config=config)
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
            await self.metrics.start()
            info = await self._engine.start(self._show_progress)
        except BaseException:
            await self.close()
            raise
        note_worker_id(info.incarnation)
        self.servicer.set_info(info)
        watch = EngineWatch(
            limit_s=self._config.stall_timeout_s,
            interval_s=self._look_interval_s,
            now=time.monotonic(),
        )
        self._watch = watch
        self._tasks = [
            asyncio.create_task(self._watch_engine(watch)),  # before: it knows why the engine died
            asyncio.create_task(self._carry_reports(watch)),
        ]
        await self.server.set_ready(ready=not self.servicer.sessions.is_draining)
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
        try:
            await self.server.serve_until_stopped(*self._tasks)
        except EngineDiedError as error:
            self.identity.forget()  # before the streams end: who asks again gets no former answer
            await self.servicer.sessions.end(UnavailableError(str(error), reason="ENGINE_ENDED"))
            raise
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop everything at once; open calls end with UNAVAILABLE."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.servicer.close()
        await self.metrics.close()
        await self.server.stop(grace_s=0)
        await self._engine.close()
        self.servicer.clean_up()

    @property
    def num_requests(self) -> int:
        """Return the requests of all orchestrators that are here."""
        return self.servicer.sessions.num_requests

    async def set_draining(self, *, is_draining: bool) -> None:
        """Take no new requests from now on, or take them again; what is here goes on.

        Raises: UnavailableError if the model is loading, or the worker is about to end.
        """
        self.identity.require_ready()
        if self.server.is_draining:
            raise UnavailableError("the worker is about to end", reason="DRAINING")
        self.servicer.sessions.is_draining = is_draining
        await self.server.set_ready(ready=not is_draining)
        logger.info("takes %s requests", "no new" if is_draining else "new")

    def order(self, order: EngineOrder) -> None:
        """Ask something of the engine's loop.

        Raises: UnavailableError while the model loads.
        """
        self.identity.require_ready()
        self._send([order])

    def _samples(self) -> Samples:
        """Return what /metrics says."""
        silence_s = 0.0 if self._watch is None else self._watch.silence_s(time.monotonic())
        return {
            **self.server.samples,
            "coppice_sessions": self.servicer.sessions.num_sessions,
            "coppice_engine_silence_seconds": silence_s,
            **dict(counted("coppice_engine_ends_total", "cause", self.engine_ends)),
            **self.identity.samples,
        }

    def _send(self, messages: Sequence[Any]) -> None:
        if messages:
            if self._watch is not None:
                self._watch.note_debt(time.monotonic())
            self._engine.send(messages)

    async def _carry_reports(self, watch: EngineWatch) -> None:
        async for report in self._engine.outputs():
            watch.note_report(
                time.monotonic(), owes_more=self._engine.is_pending, is_slow=report.is_slow
            )
            self.identity.load = report.load
            if report.counts is not None:
                self.identity.counts = report.counts
            if report.profile is not None:
                self.control.note_profile(report.profile)
            self.servicer.deliver(report)

    async def _watch_engine(self, watch: EngineWatch) -> None:
        """Kill an engine that hangs; ask one that owes nothing for a sign of life.

        Raises: EngineDiedError, when the engine was killed.
        """
        while True:
            await asyncio.sleep(self._look_interval_s)
            self.servicer.sessions.beat()
            silent_s = watch.look(time.monotonic())
            if silent_s:
                self._engine.show_stacks()
                await asyncio.sleep(_STACKS_S)
                silent_s = watch.look(time.monotonic())
            if silent_s:
                self._engine.kill()
                raise EngineDiedError(
                    f"the engine made no progress for {silent_s:.1f} s, killed it", cause="hung"
                )
            if not watch.owes_report:
                self._send([EnginePing()])

    async def _drain(self) -> None:
        self.servicer.sessions.is_draining = True
        await self.servicer.sessions.wait_idle()

    def _show_progress(self, stage: str, fraction: float = 0.0) -> None:
        announce(loading_line(self._role, stage, fraction))


def no_engine_ends() -> Counter[str]:
    """Return a count of engines that have ended, by why: none yet."""
    return Counter(dict.fromkeys(get_args(EngineEnd), 0))


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

    try:
        lease = lease_gpu(config, role=role)
        fds = [lease.fd] if lease else []

        def make_engine() -> EngineProcess:
            return EngineProcess(factory, config, kept_fds=fds)

        asyncio.run(watched(tended(_serve(config, role, make_engine, create_worker))))
    except ConfigError as error:
        sys.stderr.write(f"{role}: {error}\n")
        return EXIT_CONFIG
    except EngineDiedError as error:
        sys.stderr.write(f"{role}: {error}; its log is above\n")
        return EXIT_ENGINE_DIED
    return 0


async def _serve(
    config: WorkerConfig,
    role: str,
    make_engine: Callable[[], EngineProcess],
    create_worker: Callable[[Any, EngineHandle], WorkerServer],
) -> None:
    """Serve until the end; where an engine dies that had a spare one, that one takes over.

    Raises: ConfigError, or EngineDiedError if there is no spare one.
    """
    engine, spare, is_draining, engine_ends = make_engine(), make_engine(), False, no_engine_ends()
    try:
        while True:
            worker = create_worker(config, engine)
            worker.servicer.sessions.is_draining = is_draining
            worker.engine_ends = engine_ends
            preparing = asyncio.create_task(_prepare(spare, worker.server, config.spare_after_s))
            try:
                return await worker.serve()
            except EngineDiedError as error:
                if spare.pid is None or worker.server.is_stopping:
                    raise
                engine_ends[error.cause] += 1
                sys.stderr.write(f"{role}: {error}; its log is above; a spare one takes over\n")
            finally:
                preparing.cancel()
            config = replace(config, port=worker.server.port)
            is_draining = worker.servicer.sessions.is_draining
            engine, spare = spare, make_engine()
    finally:
        await spare.close()


async def _prepare(spare: EngineProcess, server: RpcServer, after_s: float) -> None:
    """Prepare a spare engine once a server has been ready for so long; 0: there is none."""
    if not after_s:
        return
    while not server.is_ready:
        await asyncio.sleep(LOOK_INTERVAL_S)
    await asyncio.sleep(after_s)
    spare.prepare()
