"""Fake engines behind the orchestrator's own sessions: no gRPC, virtual time, any fault.

A fault is a function that sees every message on its way and says what arrives instead, and when.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from orchestrator.pool import WorkerPool
from orchestrator.workers import WorkerSession
from shared.messages import RequestFailure
from shared.messages.batches import Batch
from tests.fakes.draft import FakeDraft
from tests.fakes.target import FakeTarget

Message = TypeVar("Message")
Result = TypeVar("Result")
Fault = Callable[[Any], list[tuple[float, Any]]]
"""Message -> [(delay in seconds, message that arrives instead)]."""

LATENCY_S = 0.001
CHANNEL_S = 0.0002
ROUND_S = 0.001
"""Of a round of the root alone by credit."""


@dataclass(frozen=True)
class Unreadable:
    """What arrives when a reply does not survive its conversion."""

    failure: RequestFailure


def pass_on(message: Any) -> list[tuple[float, Any]]:
    """Let a message arrive as it is."""
    return [(0.0, message)]


class _VirtualSelector(selectors.SelectSelector):
    """Never sleeps: time jumps to the next timer instead, and never stands still."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("deadlock: nothing is scheduled, and everybody waits")
        self.now += max(timeout, 1e-8)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtual(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a loop whose clock jumps; a deadlock raises instead of hanging."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Let a test run as `run_virtual` does."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        run_virtual(test(*args, **options))

    return run


class InMemoryWorker:
    """A worker in the same loop.

    Args:
        on_request: Fault on what the orchestrator sends.
        on_reply: Fault on what the engine answers.
        on_channel: Fault on what the engine says over its peer channels.
        peers: Workers of the other kind; each of them takes what is about a request of its own.
    """

    def __init__(
        self,
        engine: FakeTarget | FakeDraft,
        pool: WorkerPool,
        *,
        address: str,
        on_request: Fault = pass_on,
        on_reply: Fault = pass_on,
        on_channel: Fault = pass_on,
        peers: Sequence[InMemoryWorker] = (),
    ) -> None:
        self.engine = engine
        self.on_request = on_request
        self.on_reply = on_reply
        self.on_channel = on_channel
        self._peers = peers
        self._pool = pool
        self._num_sent = 0
        self._address = address
        self._wakes_at: float | None = None
        self._connect()

    def _connect(self) -> None:
        info, pool = self.engine.info, self._pool
        self.worker = WorkerSession(address=self._address, info=info, load=info.load)
        is_target = isinstance(self.engine, FakeTarget)
        self.problem = (pool.open_target if is_target else pool.open_draft)(self.worker)
        self._task = asyncio.create_task(self._serve(self.worker))

    def step(self) -> None:
        """Let the engine work and send what it answers."""
        while self.engine.has_work:
            for reply in self.engine.step():
                for delay, message in self.on_reply(reply):
                    self._after(LATENCY_S + delay, partial(self._deliver, self.worker), message)
        for said in self.engine.take_to_peer():
            for delay, message in self.on_channel(said):
                for peer in self._peers:
                    self._after(CHANNEL_S + delay, peer.hear, message)
        if isinstance(self.engine, FakeTarget):
            self._wake_at(self.engine.has_work_at)

    def _wake_at(self, when: float | None) -> None:
        """Step again when the next round by credit is due."""
        if when is not None and (self._wakes_at is None or when < self._wakes_at):
            self._wakes_at = when
            asyncio.get_running_loop().call_at(when, self._wake)

    def _wake(self) -> None:
        self._wakes_at = None
        if not self.worker.is_lost:
            self.step()

    def received(self, kind: type[Message]) -> list[Message]:
        """Return the messages of a kind that the engine has had from the orchestrator."""
        return [message for message in self.engine.received if isinstance(message, kind)]

    def lose(self, *, is_clean: bool = False) -> None:
        """End the session: the process died, or drained."""
        if not self.worker.is_lost:
            self._task.cancel()
            self.engine.requests.clear()
            self.worker.lose(is_clean=is_clean)
            self._pool.lose(self.worker)

    def reset(self, *, is_back_after_s: float = 0.1) -> None:
        """Break the connection: the process lives on, and there is another session soon."""
        self.lose()
        asyncio.get_running_loop().call_later(is_back_after_s, self._connect)

    def hear(self, message: Any) -> None:
        """Take what came over a peer channel."""
        if not self.worker.is_lost:
            self.engine.hear(message)
            self.step()

    async def _serve(self, session: WorkerSession) -> None:
        while True:
            for request in await session.take_outgoing():
                for delay, message in self.on_request(request):
                    self._after(LATENCY_S + delay, partial(self._submit, session), message)

    def _after(self, delay: float, act: Callable[[Any], None], message: Any) -> None:
        """Act after a delay; what leaves at one time arrives in order."""
        self._num_sent += 1
        asyncio.get_running_loop().call_later(delay + self._num_sent * 1e-9, act, message)

    def _submit(self, session: WorkerSession, message: Any) -> None:
        if not session.is_lost:
            self.engine.submit(message)
            self.step()

    def deliver(self, message: Any) -> None:
        """Let a reply arrive at the orchestrator, as if the engine had sent it."""
        self._deliver(self.worker, message)

    def _deliver(self, session: WorkerSession, message: Any) -> None:
        if session.is_lost:
            return
        if isinstance(message, Unreadable):
            batch: Batch[Any] = Batch(messages=[], rejected=[message.failure])
        else:
            batch = Batch(messages=[message], load=self.engine.load)
        session.receive(batch)
