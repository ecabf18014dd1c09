"""Keep a session with every worker of a role: look names up, connect, connect again.

A name stands for all its addresses, so that `--scale` of a role is noticed within
`resolve_interval_s`. gRPC's own resolver is not used: it looks again only when a connection fails.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import grpc
import grpc.aio
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential_jitter

from orchestrator.workers import (
    HANDSHAKE_TIMEOUT_S,
    Role,
    WorkerSession,
    run_session,
    shake_hands,
)
from shared.access.caller import Caller
from shared.errors import ConfigError, CoppiceError, UnauthenticatedError
from shared.rpc.channel import open_channel
from shared.rpc.status import from_rpc_error

logger = logging.getLogger(__name__)

_RECONNECT_WAIT = wait_exponential_jitter(multiplier=0.1, max=0.25, jitter=0.1)
# Of an attempt to connect; the last: of certificates. Whatever else one raises is logged in full.
_EXPECTED = (grpc.aio.AioRpcError, CoppiceError, OSError, ConfigError)
# A session that ended sooner counts as a failed attempt to connect.
_MIN_SESSION_S = 1.0
_GRPC_PREFIXES = ("failed to connect to all addresses; last error: ", "UNKNOWN: ", "UNAVAILABLE: ")

Lookup = Callable[[str, int], Awaitable[set[str]]]
"""(host, port) -> every address as HOST:PORT; OSError or none: the name is not known."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """HOST:PORT as configured; the host may be a name."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """A worker that there is no session with.

    Args:
        address: HOST:PORT; as configured, if the name has no address.
        problem: Why the last attempt failed, or what became of the session before; "": the first
            attempt has not ended.
        since_s: Since when there is no session, loop time.
    """

    address: str
    problem: str
    since_s: float


def parse_endpoints(value: str, *, option: str) -> tuple[Endpoint, ...]:
    """Parse comma-separated HOST:PORT entries.

    Raises: ConfigError naming the option and the entry.
    """
    endpoints = []
    for entry in filter(None, (part.strip() for part in value.split(","))):
        host, _, port = entry.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ConfigError(f"{option} holds {entry!r}, expected HOST:PORT[,HOST:PORT...]")
        endpoints.append(Endpoint(host.strip("[]"), int(port)))
    return tuple(endpoints)


async def lookup(host: str, port: int) -> set[str]:
    """Return every address of a host as HOST:PORT.

    Raises: OSError while the name is not known.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {
        f"[{sockaddr[0]}]:{port}" if family == socket.AF_INET6 else f"{sockaddr[0]}:{port}"
        for family, _, _, _, sockaddr in found
    }


class WorkerEndpoints:
    """Sessions with all workers of one role.

    Args:
        on_open: Takes a worker whose session is open; returns why it must not be used, or "".
        on_lost: Takes each worker, accepted or not, when its session has ended.
        on_loading: Takes the address where a process answers that has no engine.
        lookup: Finds the addresses of a name.
        caller: What workers are shown.
    """

    def __init__(
        self,
        role: Role,
        endpoints: tuple[Endpoint, ...],
        *,
        resolve_interval_s: float,
        on_open: Callable[[WorkerSession], str],
        on_lost: Callable[[WorkerSession], None],
        on_loading: Callable[[str], None],
        lookup: Lookup,
        caller: Caller,
    ) -> None:
        self._role = role
        self._endpoints = endpoints
        self._interval_s = resolve_interval_s
        self._on_open = on_open
        self._on_lost = on_lost
        self._on_loading = on_loading
        self._lookup = lookup
        self._caller = caller
        self._sessions: dict[str, asyncio.Task[None]] = {}
        self._workers: dict[str, WorkerSession] = {}
        self._attempts: dict[str, Unanswered] = {}  # by address; out of date during a session
        self._addresses: dict[Endpoint, set[str]] = {}  # as last known
        self._unknown: dict[Endpoint, Unanswered] = {}  # names without an address

    @property
    def unanswered(self) -> list[Unanswered]:
        """Return the addresses that there is no session with, and names that have no address.

        A name is left out while sessions go on with addresses that it had before.
        """
        addresses = sorted(self._sessions.keys() - self._workers.keys())
        names = [
            unknown
            for endpoint, unknown in self._unknown.items()
            if not self._addresses.get(endpoint, set()) & self._sessions.keys()
        ]
        return [*(self._attempts[address] for address in addresses), *names]

    @property
    def role_name(self) -> str:
        """Return "target" or "draft"."""
        return self._role.name

    @property
    def addresses(self) -> frozenset[str]:
        """Return the addresses that sessions are kept with."""
        return frozenset(self._sessions)

    async def run(self) -> None:
        """Follow the names until cancelled."""
        try:
            while True:
                await self._resolve()
                await asyncio.sleep(self._interval_s)
        finally:
            for task in self._sessions.values():
                task.cancel()
            await asyncio.gather(*self._sessions.values(), return_exceptions=True)

    async def _resolve(self) -> None:
        """Start a session with every new address; let go of idle ones that vanished."""
        found = await asyncio.gather(*map(self._look_up, self._endpoints))
        wanted = {
            address: endpoint.host
            for endpoint, addresses in zip(self._endpoints, found, strict=True)
            for address in addresses
        }
        for address in wanted.keys() - self._sessions.keys():
            logger.info("found %s %s", self._role.name, address)
            self._attempts[address] = Unanswered(address=address, problem="", since_s=_now_s())
            self._sessions[address] = asyncio.create_task(self.maintain(address, wanted[address]))
        if not all(found):
            return  # a name service that fails must not end sessions
        for address in list(self._sessions):
            worker = self._workers.get(address)
            if worker is not None:
                worker.is_vanished = address not in wanted
            if address not in wanted and (worker is None or not worker.num_own_requests):
                logger.info("%s %s is gone from the name service", self._role.name, address)
                del self._attempts[address]
                self._sessions.pop(address).cancel()

    async def _look_up(self, endpoint: Endpoint) -> set[str]:
        """Return the addresses of an endpoint; that there are none is noted, and logged once."""
        problem = "its name has no address"
        try:
            found = await self._lookup(endpoint.host, endpoint.port)
        except OSError as error:
            found, problem = set(), f"its name has no address: {error.strerror or error}"
        if found:
            self._addresses[endpoint] = found
            self._unknown.pop(endpoint, None)
            return found
        before = self._unknown.get(endpoint)
        if before is None:
            logger.info("%s %s is not found: %s", self._role.name, endpoint, problem)
        since_s = before.since_s if before is not None else _now_s()
        self._unknown[endpoint] = Unanswered(
            address=str(endpoint), problem=problem, since_s=since_s
        )
        return found

    async def maintain(self, address: str, host: str) -> None:
        """Connect to one address again and again, with backoff while it does not answer.

        Nothing but a cancellation ends this, not even an answer that nobody can read: the address
        would be forgotten for good.

        Args:
            host: As configured; its certificate may have this name.
        """
        while True:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(Exception),
                wait=_RECONNECT_WAIT,
                before_sleep=self._note_attempt(address),
                reraise=True,
            ):
                with attempt:
                    await self._run_once(address, host)

    async def _run_once(self, address: str, host: str) -> None:
        channel = open_channel(address, tls=self._caller.tls, server_name=host)
        try:
            worker = await self._shake_hands(channel, address)
            self._workers[address] = worker
            opened_s = _now_s()
            try:
                await run_session(self._role, channel, worker, lambda: self._open(worker))
            finally:
                del self._workers[address]
                self._note_loss(worker, is_failed_attempt=_now_s() - opened_s < _MIN_SESSION_S)
                self._on_lost(worker)
        finally:
            await channel.close()
        if _now_s() - opened_s < _MIN_SESSION_S:
            raise ConnectionError(f"the session ended at once: {worker.lost_because}")

    async def _shake_hands(self, channel: grpc.aio.Channel, address: str) -> WorkerSession:
        try:
            return await shake_hands(self._role, channel, address, self._caller)
        except grpc.aio.AioRpcError as error:
            if from_rpc_error(error).reason == "LOADING":
                self._on_loading(address)
            raise

    def _open(self, worker: WorkerSession) -> None:
        problem = self._on_open(worker)
        if problem:
            logger.error("%s %s is refused: %s", self._role.name, worker.address, problem)
        else:
            logger.info("%s %s serves %s", self._role.name, worker.address, worker.info.model)

    def _note_loss(self, worker: WorkerSession, *, is_failed_attempt: bool) -> None:
        before = self._attempts.get(worker.address)
        if before is not None:  # else the address has vanished
            since_s = before.since_s if is_failed_attempt else _now_s()
            self._attempts[worker.address] = replace(
                before, problem=worker.lost_because, since_s=since_s
            )

    def _note_attempt(self, address: str) -> Callable[[RetryCallState], None]:
        """Return what takes note of failed attempts, and logs each kind once in a row."""
        last_kind = ""

        def note(state: RetryCallState) -> None:
            nonlocal last_kind
            error = state.outcome.exception() if state.outcome else None
            problem = _problem_of(error, self._role)
            self._attempts[address] = replace(self._attempts[address], problem=problem)
            is_expected = isinstance(error, _EXPECTED)
            is_settled = isinstance(error, UnauthenticatedError | ConfigError) or not is_expected
            kind = error.reason if isinstance(error, CoppiceError) else type(error).__name__
            level = logging.DEBUG
            if is_settled and kind != last_kind:
                level = logging.ERROR  # somebody has to act, also if it began in another way
            elif state.attempt_number == 1:
                level = logging.INFO
            last_kind = kind
            logger.log(
                *(level, "%s %s does not answer: %s", self._role.name, address, problem),
                exc_info=None if is_expected else error,
            )

        return note


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _problem_of(error: BaseException | None, role: Role) -> str:
    """Return why an attempt to connect has failed: the reason by name, and what is known of it."""
    if not isinstance(error, _EXPECTED):
        return f"{type(error).__name__}: {error}"
    if not isinstance(error, grpc.aio.AioRpcError | CoppiceError):
        return str(error)
    known = from_rpc_error(error) if isinstance(error, grpc.aio.AioRpcError) else error
    if known.reason == grpc.StatusCode.DEADLINE_EXCEEDED.name:
        return f"{known.reason}: it did not answer within {HANDSHAKE_TIMEOUT_S:g} s"
    if known.reason == grpc.StatusCode.UNIMPLEMENTED.name:
        return f"{known.reason}: what answers there serves no {role.service}"
    message = known.message
    for prefix in _GRPC_PREFIXES:
        message = message.removeprefix(prefix)
    return f"{known.reason}: {message}"
