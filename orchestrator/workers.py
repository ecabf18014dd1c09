"""One session with one worker: a stream of batched messages, from handshake to loss.

A `WorkerSession` lives as long as its stream. When the stream ends every request on it hears
WorkerLost, and `endpoints.py` connects again: the next session may be with another incarnation.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from orchestrator.siblings import SharedLoads
from shared.access.caller import NOBODY, Caller
from shared.messages import (
    RequestFailure,
    TargetAdmitted,
    WorkerInfo,
    WorkerLoad,
    batches,
    from_proto,
)
from shared.rpc.health_names import DRAFT_SERVICE, TARGET_SERVICE
from shared.rpc.protocol import METADATA
from shared.rpc.status import from_rpc_error

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
# A worker says something every 0.5 s at least, whatever its engine does.
SILENCE_S = 5.0
_LOOK_INTERVAL_S = 0.5
# Of the longest fields in one batch, beyond its last message: far below MAX_INTERNAL_MESSAGE_BYTES,
# as the longest prompt with the largest grammar takes 24 MiB by itself.
_MAX_BATCH_BYTES = 16 << 20
_MAX_TOKEN_BYTES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What differs between talking to a target and to a draft."""

    name: str
    service: str
    make_stub: Callable[[grpc.aio.Channel], Any]
    info_request: type[Any]
    pack: Callable[[list[Any]], Any]
    unpack: Callable[[Any], batches.Batch[Any]]


TARGET = Role(
    name="target",
    service=TARGET_SERVICE,
    make_stub=target_pb2_grpc.TargetServiceStub,
    info_request=target_pb2.TargetServiceGetInfoRequest,
    pack=batches.pack_target_request,
    unpack=batches.unpack_target_response,
)
DRAFT = Role(
    name="draft",
    service=DRAFT_SERVICE,
    make_stub=draft_pb2_grpc.DraftServiceStub,
    info_request=draft_pb2.DraftServiceGetInfoRequest,
    pack=batches.pack_draft_request,
    unpack=batches.unpack_draft_response,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbled:
    """A reply about a request that could not be read."""

    failure: RequestFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The worker is gone.

    Args:
        is_clean: It said so first (draining), or ended the stream in order.
    """

    is_clean: bool


@dataclass(frozen=True, slots=True)
class WorkerDrains:
    """The worker takes no new requests: who has something there may move it elsewhere now."""


class Handler(Protocol):
    """What takes the replies of one worker about one request."""

    @property
    def waits_since(self) -> float | None:
        """Return since when the worker owes an answer, loop time; None: it owes none."""

    def receive(self, message: Any) -> None:
        """Take a reply, Garbled, WorkerLost or WorkerDrains; must not block."""


class Fate(enum.Enum):
    """What became of a process after its session."""

    UNKNOWN = "nothing at its address has answered since"
    ENDED = "its engine has ended, or another process answers at its address"
    LIVES = "it has answered since: only the connection had broken"


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class WorkerSession:
    """A worker as requests see it: identity, load, messages to it and from it.

    Args:
        address: HOST:PORT as dialled.
        info: From the handshake; fixed for the life of the session.
        channel: To call the worker beside the session; None: there is none.
        caller: What the worker is shown with each call.
        problem: Why the worker must not be used; empty: nothing is wrong.
        load: As last reported.
        last_progress: Loop time of the last sign that the engine advances.
        num_received: Messages of the worker, empty ones included.
        silent_s: For how long it has said nothing at all, seconds in which this process ran.
        is_draining: The worker takes no more requests.
        is_vanished: The name service no longer gives this address.
        is_lost: The session has ended.
        lost_by: Why: ended (in order), error or silent; "" before.
        lost_because: What is known of that, in words.
        lost_s: When, loop time.
        fate: What became of the process since.
        opening: Requests whose open was sent and not admitted yet.
        suspects: Requests that the worker went down with and that have not run elsewhere since.
        on_trial: The request that is tried here because workers went down with it; "" if none.
        loads: What other processes of this orchestrator have here, which they say at once.
    """

    address: str
    info: WorkerInfo
    channel: grpc.aio.Channel | None = None
    caller: Caller = NOBODY
    problem: str = ""
    load: WorkerLoad = field(default_factory=WorkerLoad)
    last_progress: float = 0.0
    num_received: int = 0
    silent_s: float = 0.0
    is_draining: bool = False
    is_vanished: bool = False
    is_lost: bool = False
    lost_by: str = ""
    lost_because: str = ""
    lost_s: float = 0.0
    fate: Fate = Fate.UNKNOWN
    opening: set[str] = field(default_factory=set)
    suspects: set[str] = field(default_factory=set)
    on_trial: str = ""
    on_load: Callable[[], None] = lambda: None
    loads: SharedLoads | None = None
    _num_others: int = 0
    _num_known: int = 0
    _handlers: dict[str, Handler] = field(default_factory=dict)
    _outbox: list[Any] = field(default_factory=list)
    _has_outgoing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._note_load(self.load)

    def __str__(self) -> str:
        return f"{self.info.kind} {self.address}"

    @property
    def role(self) -> str:
        """Return "target" or "draft"; `info.kind` of a draft says which kind of draft."""
        return "target" if self.info.kind == "target" else "draft"

    @property
    def host(self) -> str:
        """Return the host of the address: a machine, a container, or a pod of several."""
        return self.address.rpartition(":")[0]

    @property
    def is_available(self) -> bool:
        """Return whether new requests may go here."""
        return not (self.is_draining or self.is_vanished or self.is_lost)

    @property
    def num_requests(self) -> int:
        """Return the requests here: ours, those of the other processes of this orchestrator, and
        what others had here at the last report.
        """
        return self.num_own_requests + self._num_of_siblings + self._num_others

    @property
    def num_own_requests(self) -> int:
        """Return this process's requests here."""
        return len(self._handlers.keys() | self.opening)

    @property
    def num_free_tokens(self) -> int:
        """Return the KV slots that are free."""
        return self.load.num_free_pages * self.info.page_size

    @property
    def free_share(self) -> float:
        """Return the share of KV pages that is free, 0..1."""
        return self.load.num_free_pages / self.load.num_pages if self.load.num_pages else 1.0

    @property
    def waits_since(self) -> float | None:
        """Return since when the worker owes a request an answer, loop time; None: it owes none."""
        waits = (handler.waits_since for handler in self._handlers.values())
        return min((since for since in waits if since is not None), default=None)

    def share_loads(self, loads: SharedLoads | None) -> None:
        """Count what other processes of this orchestrator have here from now on."""
        self.loads = loads
        self._note_load(self.load)

    def attach(self, request_id: str, handler: Handler) -> None:
        """Hand replies about a request to a handler from now on; it replaces the former one."""
        if self.is_lost:  # since it was chosen
            handler.receive(WorkerLost(is_clean=True))
        else:
            self._handlers[request_id] = handler
            self._note_own()

    def detach(self, request_id: str, handler: Handler) -> None:
        """Undo `attach`, unless another handler has replaced this one."""
        if self._handlers.get(request_id) is handler:
            del self._handlers[request_id]
        self.withdraw(request_id)
        self.on_load()

    def expect(self, request_id: str) -> None:
        """Count a request that will open here."""
        self.opening.add(request_id)
        self._note_own()

    def withdraw(self, request_id: str) -> None:
        """Take a request back that was to open here."""
        self.opening.discard(request_id)
        self._note_own()
        if self.on_trial == request_id:
            self.on_trial = ""

    def end_trial(self, request_id: str) -> None:
        """Let the next request be tried, if it was this one's turn."""
        if self.on_trial == request_id:
            self.on_trial = ""
            self.on_load()

    def suspect_all(self) -> None:
        """Suspect every request here: the worker hangs, and any of them may be why."""
        self.suspects.update(self._handlers)

    def offer_moves(self) -> None:
        """Let every request here move elsewhere, if it can: the worker drains."""
        for handler in list(self._handlers.values()):
            handler.receive(WorkerDrains())

    def send(self, message: Any) -> None:
        """Queue a message; whatever is queued when the stream is free leaves as one batch."""
        if not self.is_lost:
            self._outbox.append(message)
            self._has_outgoing.set()

    async def take_outgoing(self) -> list[Any]:
        """Wait for queued messages and return them, at most a message's worth."""
        await self._has_outgoing.wait()
        count = num_bytes = 0
        while count < len(self._outbox) and num_bytes < _MAX_BATCH_BYTES:
            num_bytes += _size_of(self._outbox[count])
            count += 1
        taken, self._outbox = self._outbox[:count], self._outbox[count:]
        if not self._outbox:
            self._has_outgoing.clear()
        return taken

    def receive(self, batch: batches.Batch[Any]) -> None:
        """Hand every message of a batch to its request."""
        self.num_received += 1
        for message in batch.messages:
            if isinstance(message, TargetAdmitted):
                self.opening.discard(message.request_id)
            self._deliver(message.request_id, message)
        for failure in batch.rejected:
            logger.warning("%s sent a malformed reply: %s", self, failure.message)
            self._deliver(failure.request_id, Garbled(failure=failure))
        if batch.messages or (batch.load and batch.load.num_steps != self.load.num_steps):
            self.last_progress = asyncio.get_running_loop().time()
        if batch.load is not None:
            self._note_load(batch.load)
        self.on_load()

    def lose(self, *, is_clean: bool) -> None:
        """Hand WorkerLost to every request."""
        self.is_lost, self.lost_s = True, asyncio.get_running_loop().time()
        self._outbox.clear()
        handlers, self._handlers = self._handlers, {}
        if self.loads is not None:
            self.loads.note(self.address, 0)
        for handler in handlers.values():
            handler.receive(WorkerLost(is_clean=is_clean or self.is_draining))

    def _note_load(self, load: WorkerLoad) -> None:
        self.load = load
        # What a sibling has closed since, the worker may still have counted: when a batch ends, the
        # next one would be spread as if that were somebody's. It was known at the report before.
        known_before, self._num_known = (
            self._num_known,
            self.num_own_requests + self._num_of_siblings,
        )
        reported = load.num_running + load.num_waiting
        self._num_others = max(0, reported - max(known_before, self._num_known))

    @property
    def _num_of_siblings(self) -> int:
        return self.loads.others(self.address) if self.loads is not None else 0

    def _note_own(self) -> None:
        if self.loads is not None and not self.is_lost:
            self.loads.note(self.address, self.num_own_requests)

    def _deliver(self, request_id: str, message: Any) -> None:
        handler = self._handlers.get(request_id)
        if handler is not None:  # else: closed meanwhile
            handler.receive(message)


def _size_of(message: Any) -> int:
    """Return the bytes that the longest fields of a message take at most."""
    num_tokens = len(getattr(message, "token_ids", ()))
    return _MAX_TOKEN_BYTES * num_tokens + len(getattr(message, "compiled_grammar", b""))


async def shake_hands(
    role: Role, channel: grpc.aio.Channel, address: str, caller: Caller
) -> WorkerSession:
    """Ask a worker who it is.

    Raises: AioRpcError while it does not answer, UnauthenticatedError if it takes no calls from
        here, InvalidArgumentError if its answer is malformed.
    """
    metadata = (*METADATA, *caller.metadata(f"/{role.service}/GetInfo"))
    stub = role.make_stub(channel)
    try:
        response = await stub.GetInfo(
            role.info_request(), timeout=HANDSHAKE_TIMEOUT_S, metadata=metadata
        )
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise from_rpc_error(error) from None
        raise
    info = from_proto(response.info)
    now = asyncio.get_running_loop().time()
    return WorkerSession(
        address=address,
        info=info,
        channel=channel,
        caller=caller,
        load=info.load,
        last_progress=now,
    )


async def run_session(
    role: Role,
    channel: grpc.aio.Channel,
    worker: WorkerSession,
    on_open: Callable[[], None],
) -> None:
    """Talk to a worker until its stream ends; then its requests hear WorkerLost.

    Args:
        on_open: Called when the stream is open and messages may be sent.
    Raises: What a message raised that could not be read at all.
    """
    metadata = (*METADATA, *worker.caller.metadata(f"/{role.service}/Session"))
    call = role.make_stub(channel).Session(metadata=metadata)
    tasks: list[asyncio.Task[None]] = []
    is_clean = False
    try:
        async with asyncio.timeout(None) as patience:
            tasks = [
                asyncio.create_task(_write(role, call, worker)),
                asyncio.create_task(_watch_health(role, channel, worker)),
                asyncio.create_task(_watch_silence(worker, patience)),
            ]
            on_open()
            async for response in call:
                worker.receive(role.unpack(response))
        is_clean, worker.lost_by, worker.lost_because = True, "ended", "it has ended the session"
        logger.info("%s ended the session", worker)
    except TimeoutError:
        worker.lost_by, worker.lost_because = "silent", f"it said nothing for {SILENCE_S:g} s"
        logger.warning("lost %s: %s", worker, worker.lost_because)
    except grpc.aio.AioRpcError as error:
        cause = from_rpc_error(error)
        worker.lost_by, worker.lost_because = "error", f"{error.code().name} {cause.message}"
        if cause.reason == "ENGINE_ENDED":
            worker.fate = Fate.ENDED
        logger.warning("lost %s: %s", worker, worker.lost_because)
    except Exception as error:
        worker.lost_by, worker.lost_because = "error", f"{type(error).__name__}: {error}"
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        call.cancel()
        worker.lose(is_clean=is_clean)


async def _write(role: Role, call: Any, worker: WorkerSession) -> None:
    while True:
        batch = await worker.take_outgoing()
        try:
            await call.write(role.pack(batch))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reading side says why


async def _watch_silence(worker: WorkerSession, patience: asyncio.Timeout) -> None:
    """End the patience with a worker that says nothing.

    Looks are counted, not seconds: time in which this process did not run does not count.
    """
    while worker.silent_s < SILENCE_S:
        num_received = worker.num_received
        await asyncio.sleep(_LOOK_INTERVAL_S)
        is_silent = worker.num_received == num_received
        worker.silent_s = worker.silent_s + _LOOK_INTERVAL_S if is_silent else 0.0
    patience.reschedule(asyncio.get_running_loop().time())


async def _watch_health(role: Role, channel: grpc.aio.Channel, worker: WorkerSession) -> None:
    """Note when the worker starts to drain; one without a health service never does."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=role.service)
    )
    try:
        async for response in watch:
            is_draining = response.status == health_pb2.HealthCheckResponse.NOT_SERVING
            if worker.is_draining != is_draining:
                worker.is_draining = is_draining
                logger.info("%s %s", worker, "takes no new requests" if is_draining else "is ready")
                worker.on_load()
    except grpc.aio.AioRpcError:
        return
    finally:
        watch.cancel()
