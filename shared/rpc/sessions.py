"""Session streams of a worker: one per orchestrator, batches in, coalesced batches out.

A request belongs to the stream that opened it last; answers go there, and when the stream ends its
requests are closed in the engine. Messages about a request that is not the stream's own are
answered NOT_FOUND here, so that every answer has somewhere to go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio

from shared.errors import (
    CoppiceError,
    NotFoundError,
    ResourceExhaustedError,
    StaleStateError,
    UnavailableError,
)
from shared.messages import RequestFailure, WorkerLoad
from shared.messages.batches import Batch
from shared.rpc.outbox import Outbox, write
from shared.rpc.status import abort, failure_of
from shared.times import leave

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
END_TIMEOUT_S = 0.5
MAX_OPENS = 4096
"""Requests of one stream; an orchestrator opens as many as it admits, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionProtocol:
    """What differs between a target's and a draft's session.

    Args:
        open_type: The message that starts a request.
        close_type: The message that ends it.
        make_close: (request_id, epoch) -> close message.
        epoch_of: Epoch of any message, as the role counts it.
        unpack: Stream request -> Batch.
        pack: (messages, load) -> stream response.
        is_final: Whether the request has ended with this answer.
    """

    open_type: type[Any]
    close_type: type[Any]
    make_close: Callable[[str, int], Any]
    epoch_of: Callable[[Any], int]
    unpack: Callable[[Any], Batch[Any]]
    pack: Callable[[Sequence[Any], WorkerLoad], Any]
    is_final: Callable[[Any], bool]


@dataclass(slots=True, kw_only=True, eq=False)
class _Session:
    call: asyncio.Task[Any]
    outbox: Outbox = field(default_factory=Outbox)
    epochs: dict[str, int] = field(default_factory=dict)  # of the requests that it owns
    timed: set[str] = field(default_factory=set)
    last_write: float = 0.0


class SessionHub:
    """All session streams of a worker and the routes of its requests.

    Args:
        send: Queues messages for the engine.
    """

    def __init__(self, protocol: SessionProtocol, send: Callable[[Sequence[Any]], None]) -> None:
        self._protocol = protocol
        self._send = send
        self._sessions: set[_Session] = set()
        self._routes: dict[str, _Session] = {}
        self._load = WorkerLoad()
        self._idle = asyncio.Event()
        self._idle.set()
        self._error: CoppiceError | None = None
        self.is_draining = False

    @property
    def num_requests(self) -> int:
        """Return the requests that some stream owns."""
        return len(self._routes)

    @property
    def num_sessions(self) -> int:
        """Return the open streams."""
        return len(self._sessions)

    async def wait_idle(self) -> None:
        """Wait until no stream owns a request."""
        await self._idle.wait()

    async def end(self, error: CoppiceError) -> None:
        """End every stream with an error, behind what it has still to say.

        Returns once that is sent; those that do not read are not waited for.
        """
        self._error = error
        for session in self._sessions:
            session.outbox.close()
        if calls := [session.call for session in self._sessions]:
            await asyncio.wait(calls, timeout=END_TIMEOUT_S)

    async def serve(
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> None:
        """Serve one stream until its orchestrator closes it."""
        call = asyncio.current_task()
        assert call is not None
        session = _Session(call=call)
        session.outbox.wake()  # the first answer is the load
        self._sessions.add(session)
        reader = asyncio.create_task(self._read(session, request_iterator))
        reader.add_done_callback(lambda _: session.outbox.close())
        try:
            with contextlib.suppress(EOFError):
                while True:
                    messages = await session.outbox.take()
                    session.last_write = time.monotonic()
                    await write(context, self._protocol.pack(leave(messages), self._load))
            if self._error is not None:
                await abort(context, self._error)
            await reader
        finally:
            reader.cancel()
            self._release(session)

    def deliver(self, outputs: Sequence[Any], load: WorkerLoad) -> None:
        """Give the engine's answers to the streams that own their requests."""
        self._load = load
        by_session: dict[_Session, list[Any]] = {}
        closes = []
        for output in outputs:
            session = self._routes.get(output.request_id)
            if session is None:
                logger.debug("%s for nobody", type(output).__name__)
                continue
            by_session.setdefault(session, []).append(output)
            epoch = session.epochs[output.request_id]
            if self._protocol.is_final(output) and self._protocol.epoch_of(output) == epoch:
                self._forget(output.request_id)
                if isinstance(output, RequestFailure):
                    # What failed may be one message: a refused open leaves the older request as
                    # it was, and nobody else would close it now.
                    closes.append(self._protocol.make_close(output.request_id, epoch))
        if closes:
            self._send(closes)
        for session, messages in by_session.items():
            session.outbox.put(messages)
        self.beat()

    def beat(self) -> None:
        """Say something on every stream that was silent, so that this worker counts as alive."""
        silent_since = time.monotonic() - HEARTBEAT_S
        for session in self._sessions:
            if session.last_write < silent_since:
                session.outbox.wake()

    async def _read(self, session: _Session, request_iterator: AsyncIterator[Any]) -> None:
        async for request in request_iterator:
            received_ns = time.monotonic_ns() if session.timed else 0
            batch = self._protocol.unpack(request)
            if batch.rejected:
                session.outbox.put(batch.rejected)
            accepted = [message for message in batch.messages if self._admit(session, message)]
            if received_ns:
                accepted = [_received(message, session.timed, received_ns) for message in accepted]
            self._send(accepted)
            await session.outbox.wait_room()

    def _admit(self, session: _Session, message: Any) -> bool:
        """Update the routes; answer what the engine should not see."""
        request_id: str = message.request_id
        epoch = self._protocol.epoch_of(message)
        owner = self._routes.get(request_id)
        if isinstance(message, self._protocol.open_type):
            if self.is_draining:
                session.outbox.put([failure_of(_DRAINING, message)])
                return False
            if owner is not None:
                if owner.epochs[request_id] >= epoch:
                    session.outbox.put([failure_of(_stale(owner.epochs[request_id]), message)])
                    return False
                del owner.epochs[request_id]
                owner.timed.discard(request_id)
            elif len(session.epochs) >= MAX_OPENS:
                session.outbox.put([failure_of(_FULL, message)])
                return False
            self._routes[request_id] = session
            session.epochs[request_id] = epoch
            if message.is_timed:
                session.timed.add(request_id)
            self._idle.clear()
            return True
        if isinstance(message, self._protocol.close_type):
            if owner is session and epoch >= session.epochs[request_id]:
                self._forget(request_id)
            return owner is session
        if owner is session:
            return True
        error = NotFoundError(
            f"no request {request_id!r} on this stream; open it here first", field="request_id"
        )
        session.outbox.put([failure_of(error, message)])
        return False

    def _forget(self, request_id: str) -> None:
        session = self._routes.pop(request_id)
        del session.epochs[request_id]
        session.timed.discard(request_id)
        if not self._routes:
            self._idle.set()

    def _release(self, session: _Session) -> None:
        self._sessions.discard(session)
        session.outbox.close()
        closes = [
            self._protocol.make_close(request_id, epoch)
            for request_id, epoch in session.epochs.items()
        ]
        for request_id in list(session.epochs):
            self._forget(request_id)
        if closes:
            logger.info("a session stream ended, closing its %d requests", len(closes))
        self._send(closes)


def _received(message: Any, timed: set[str], received_ns: int) -> Any:
    """Return a message; a timed request's order of a round knows when it came."""
    if message.request_id in timed and hasattr(message, "received_ns"):
        return replace(message, received_ns=received_ns)
    return message


_DRAINING = UnavailableError(
    "this worker is draining; open the request on another one", reason="DRAINING"
)

_FULL = ResourceExhaustedError(
    f"this stream has {MAX_OPENS} requests open; close some first", reason="TOO_MANY_OPENS"
)


def _stale(epoch: int) -> StaleStateError:
    return StaleStateError(f"the request is open with epoch {epoch}; re-open it with a newer one")
