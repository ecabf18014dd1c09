"""Real workers (server, servicer, streams) around fake engines, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draft_service.server import create_worker as create_draft_worker
from shared.config import DraftConfig, TargetConfig
from shared.messages import WorkerInfo
from shared.rpc.engine import Engine, EngineDiedError, EngineOrder, EngineReport, ProgressCallback
from shared.rpc.worker import WorkerServer
from target_service.server import create_worker as create_target_worker
from tests.fakes.draft import FakeDraft
from tests.fakes.target import FakeTarget

_LOCAL: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "drain_timeout_s": 0.05}


class LocalEngine:
    """An EngineHandle whose engine lives in this process and can be paused and killed.

    Args:
        step_s: Duration of a step.
        load_s: Duration of the start, unless `finish_loading` ends it.
    """

    def __init__(self, engine: Engine, *, step_s: float = 0.0, load_s: float = 0.0) -> None:
        self.engine = engine
        self.step_s = step_s
        self._load_s = load_s
        self._inbox: list[Any] = []
        self._num_sent = self._num_received = 0
        self._wake, self._is_loaded = asyncio.Event(), asyncio.Event()
        self._is_paused = self._is_dead = self._is_closed = False

    pid: int | None = None

    @property
    def is_pending(self) -> bool:
        return self.engine.has_work or self._num_received < self._num_sent

    def num_waiting(self, kind: type) -> int:
        """Return how many messages of a kind the engine has not taken."""
        return sum(isinstance(message, kind) for message in self._inbox)

    async def start(self, on_progress: ProgressCallback) -> WorkerInfo:
        on_progress("pretending to load", 0.5)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_loaded.wait(), self._load_s)
        return self.engine.info

    def send(self, messages: Sequence[Any]) -> None:
        self._inbox += messages
        self._num_sent += len(messages)
        self._wake.set()

    async def outputs(self) -> AsyncIterator[EngineReport]:
        while not self._is_closed:
            await self._wake.wait()
            self._wake.clear()
            self._check_alive()
            while not self._is_paused and (self._inbox or self.engine.has_work):
                self._check_alive()
                messages, self._inbox = self._inbox, []
                for message in messages:
                    if not isinstance(message, EngineOrder):
                        self.engine.submit(message)
                self._num_received += len(messages)
                outputs = self.engine.step() if self.engine.has_work else []
                await asyncio.sleep(self.step_s)
                yield EngineReport(
                    outputs=outputs,
                    load=self.engine.load,
                    num_received=self._num_received,
                    has_work=self.engine.has_work,
                    counts=self.engine.counts,
                )

    def _check_alive(self) -> None:
        if self._is_dead or self._is_closed:
            raise EngineDiedError("the fake engine was killed", exit_code=-9)

    async def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    def finish_loading(self) -> None:
        """End the start."""
        self._is_loaded.set()

    def pause(self) -> None:
        """Stop stepping, as a hung device would; messages pile up."""
        self._is_paused = True

    def resume(self) -> None:
        """Step again."""
        self._is_paused = False
        self._wake.set()

    def wake(self) -> None:
        """Look at the engine again after a test changed it."""
        self._wake.set()

    def show_stacks(self) -> None:
        """Say nothing: the test's own process would tell of itself."""

    def kill(self) -> None:
        """Die as the engine process would."""
        self._is_dead = True
        self._wake.set()


@dataclass(frozen=True, kw_only=True)
class FakeWorker:
    """A serving worker.

    Args:
        engine: FakeTarget or FakeDraft.
        handle: Pauses, wakes and kills it.
        running: Ends when the worker ends; raises EngineDiedError after `handle.kill()`.
    """

    worker: WorkerServer
    engine: Any
    handle: LocalEngine
    running: asyncio.Task[None]

    @property
    def address(self) -> str:
        return self.worker.address

    async def close(self) -> None:
        """Drain and end, as SIGTERM would.

        Raises: what the engine raised, unless it was killed.
        """
        self.worker.server.request_stop()
        with contextlib.suppress(EngineDiedError):
            await self.running


def fake_target(
    engine: FakeTarget | None = None, *, step_s: float = 0.0, **fields: Any
) -> contextlib.AbstractAsyncContextManager[FakeWorker]:
    """Serve a fake target on the loopback interface.

    Args:
        fields: Of TargetConfig.
    """
    handle = LocalEngine(engine or FakeTarget(), step_s=step_s)
    return _serving(create_target_worker(TargetConfig(**_LOCAL | fields), handle), handle)


def fake_draft(
    engine: FakeDraft | None = None, *, step_s: float = 0.0, **fields: Any
) -> contextlib.AbstractAsyncContextManager[FakeWorker]:
    """Serve a fake draft on the loopback interface.

    Args:
        fields: Of DraftConfig.
    """
    handle = LocalEngine(engine or FakeDraft(), step_s=step_s)
    return _serving(create_draft_worker(DraftConfig(**_LOCAL | fields), handle), handle)


@contextlib.asynccontextmanager
async def _serving(worker: WorkerServer, handle: LocalEngine) -> AsyncIterator[FakeWorker]:
    await worker.start()
    running = asyncio.create_task(worker.run())
    fake = FakeWorker(worker=worker, engine=handle.engine, handle=handle, running=running)
    try:
        yield fake
    finally:
        await fake.close()


async def eventually(
    condition: Callable[[], bool], *, timeout_s: float = 60.0, what: str = "condition"
) -> None:
    """Wait until a condition holds.

    Raises: AssertionError when time is up.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"{what} within {timeout_s} s"
        await asyncio.sleep(0.005)
