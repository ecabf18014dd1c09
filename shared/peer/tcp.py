"""Channels over TCP, between the engines of a target and a draft that share no memory.

The frames are those of channel.py. Connections are opened, and both ends proven (handshake.py), in
a thread of its own: it waits for no step, and no step waits for a host that does not answer. The
engine's loop is handed sockets whose other end is known. Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import re
import secrets
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from shared.peer.channel import PeerChannel, draft_end, target_end
from shared.peer.handshake import TOKEN_BYTES, HandshakeError, prove_draft, prove_target

logger = logging.getLogger(__name__)

_DIAL_TIMEOUT_S = 2.0  # to connect and shake hands: a request waits so long for its first tree
_HANDSHAKE_TIMEOUT_S = 3.0
_MAX_HANDSHAKES = 64  # at once
_BACKLOG = 64
_MAX_PORT = 65535
_RETRY_S = (1.0, 60.0)  # after a dial that failed: the first time, and at most
_ACCEPT_RETRY_S = 0.1
# An end that vanishes without a word is noticed after about 10 s; one that is merely slow is not.
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 4,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 20_000,  # ms
}
_ADDRESS = re.compile(
    r"(?P<host>\[[0-9a-fA-F:.%\w]+\]|[\w.-]*):(?P<port>\d{1,5})"
    rf"/(?P<token>[0-9a-f]{{{2 * TOKEN_BYTES}}})"
)


class PeerAddress(NamedTuple):
    """Where a target listens, as WorkerInfo.peer_address says it: HOST:PORT/TOKEN.

    Args:
        host: Of IPv6 without brackets; empty: that of the worker's own address.
        token: Tells the target from others that listened, or will, at the same place.
    """

    host: str
    port: int
    token: bytes

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.token.hex()}"

    @classmethod
    def parse(cls, text: str, *, worker_address: str) -> PeerAddress:
        """Return the address that a text says.

        Args:
            worker_address: HOST:PORT of the target's front.
        Raises: ValueError.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no HOST:PORT/TOKEN")
        host = match["host"] or worker_address.rpartition(":")[0]
        if not 0 < int(match["port"]) <= _MAX_PORT:
            raise ValueError(f"{text!r} has no port")
        return cls(host.strip("[]"), int(match["port"]), bytes.fromhex(match["token"]))


class TcpListener:
    """Where drafts on other hosts open channels to a target.

    Args:
        host: Address to listen on.
        port: 0: any that is free.
        keys: Of which drafts must know one; at least one.
    Raises: OSError if the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, keys: Sequence[bytes]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        sock.settimeout(0)
        bound_host, bound_port = sock.getsockname()[:2]
        token = secrets.token_bytes(TOKEN_BYTES)
        reachable = "" if ipaddress.ip_address(bound_host).is_unspecified else bound_host
        self.port = bound_port
        self.address = str(PeerAddress(reachable, bound_port, token))
        self._background = _Background()
        self._background.start(_Admission(sock, keys, token, self._background).run())
        self.close = weakref.finalize(self, _close_listener, self._background, sock)

    @property
    def events(self) -> dict[int, int]:
        """Return the descriptor to wait for, and what for, as for `select.poll`."""
        return self._background.events

    def accept(self) -> list[PeerChannel]:
        """Return the channels that drafts have opened since."""
        return [target_end(sock) for _, sock in self._background.take() if sock is not None]


class TcpDialer:
    """Opens a draft's ends of channels, beside whatever its engine does.

    Args:
        keys: Of which targets must know one; at least one.
        on_done: Called by `accept` with the end of each dial: its channel, or None if it failed.
    """

    def __init__(
        self, keys: Sequence[bytes], on_done: Callable[[PeerAddress, PeerChannel | None], None]
    ) -> None:
        self._keys = keys
        self._on_done = on_done
        self._background = _Background()
        self.close = weakref.finalize(self, self._background.close)
        self._dialled: set[PeerAddress] = set()
        self._failed: dict[PeerAddress, tuple[float, float]] = {}  # (again at, after so long), s

    @property
    def events(self) -> dict[int, int]:
        """Return the descriptor to wait for, and what for, as for `select.poll`."""
        return self._background.events

    def dial(self, address: PeerAddress) -> bool:
        """Begin to open a channel, unless that has begun; return False if it failed just now."""
        if address in self._dialled:
            return True
        if time.monotonic() < self._failed.get(address, (0.0, 0.0))[0]:
            return False
        self._dialled.add(address)
        self._background.start(_dial(address, self._keys, self._background))
        return True

    def accept(self) -> list[PeerChannel]:
        """Return the channels that are open since; `on_done` has heard of them."""
        channels = []
        for address, sock in self._background.take():
            assert address is not None
            self._dialled.remove(address)
            channel = draft_end(sock) if sock is not None else None
            if channel is not None:
                channels.append(channel)
            self._note(address, is_open=channel is not None)
            self._on_done(address, channel)
        return channels

    def _note(self, address: PeerAddress, *, is_open: bool) -> None:
        """Let dials that fail become rarer; forget targets that nobody asks for any more."""
        now = time.monotonic()
        _, waited_s = self._failed.pop(address, (0.0, 0.0))
        self._failed = {
            other: (at, after)
            for other, (at, after) in self._failed.items()
            if now < at + _RETRY_S[1]
        }
        if not is_open:
            wait_s = min(max(2 * waited_s, _RETRY_S[0]), _RETRY_S[1])
            self._failed[address] = now + wait_s, wait_s


_Handed = tuple[PeerAddress | None, socket.socket | None]
"""What was dialled, None by a listener; its connection, None if there is none."""


class _Background:
    """A thread that runs coroutines, and hands sockets over to the engine's loop.

    It is started with the first coroutine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handed: deque[_Handed] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._running: set[Future[None]] = set()  # a loop itself does not keep its tasks

    @property
    def events(self) -> dict[int, int]:
        """Return the descriptor that is readable while something was handed over."""
        return {self._fd: select.POLLIN}

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run_loop, args=[self._loop], name="coppice-peer-tcp", daemon=True
            )
            self._thread.start()
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    def put(self, handed: _Handed) -> None:
        """Hand something over; for the coroutines."""
        with self._lock:
            self._handed.append(handed)
            os.eventfd_write(self._fd, 1)

    def take(self) -> list[_Handed]:
        """Return what was handed over since; an engine asks thousands of times per second."""
        if not self._handed:
            return []
        with self._lock:
            os.eventfd_read(self._fd)
            handed = list(self._handed)
            self._handed.clear()
        return handed

    def close(self) -> None:
        """End the thread, and whatever is not done."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        for _, sock in self.take():
            if sock is not None:
                sock.close()
        os.close(self._fd)


class _Admission:
    """Accepts connections and hands over those whose other end is a draft of this deployment."""

    def __init__(
        self, sock: socket.socket, keys: Sequence[bytes], token: bytes, background: _Background
    ) -> None:
        self._socket = sock
        self._keys = keys
        self._token = token
        self._background = background
        self._handshakes: dict[asyncio.Task[None], None] = {}  # oldest first
        self._logged: set[str] = set()  # since a draft was let in: whoever knocks writes no log

    async def run(self) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._accept)
        try:
            await loop.create_future()
        finally:
            loop.remove_reader(self._socket)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, address = self._socket.accept()
        except BlockingIOError:  # whoever it was has gone
            return
        except OSError as error:
            self._tell("a draft cannot open a peer channel", str(error))
            loop.remove_reader(self._socket)
            loop.call_later(_ACCEPT_RETRY_S, loop.add_reader, self._socket, self._accept)
            return
        sock.settimeout(0)
        task = loop.create_task(self._admit(sock, address[0]))
        task.add_done_callback(functools.partial(self._forget, sock))
        self._handshakes[task] = None
        if len(self._handshakes) > _MAX_HANDSHAKES:  # a draft's takes a moment
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()

    def _forget(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        if task.cancelled():
            sock.close()

    async def _admit(self, sock: socket.socket, host: str) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                _tune(sock)
                await prove_target(sock, keys=self._keys, token=self._token)
        except (HandshakeError, OSError) as error:  # TimeoutError is one
            sock.close()
            self._tell(f"refused a peer connection from {host}", _reason(error))
        else:
            self._logged.clear()
            self._background.put((None, sock))

    def _tell(self, what: str, why: str) -> None:
        if why not in self._logged:
            self._logged.add(why)
            logger.warning("%s: %s", what, why)


async def _dial(address: PeerAddress, keys: Sequence[bytes], background: _Background) -> None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock: socket.socket | None = None
    try:
        async with asyncio.timeout(_DIAL_TIMEOUT_S):
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            _tune(sock)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, (address.host, address.port))
            await prove_draft(sock, keys=keys, token=address.token)
    except (HandshakeError, OSError, UnicodeError) as error:  # the last: of a host's name
        logger.warning(
            "rounds go through the orchestrator: no peer channel to %s port %d: %s",
            address.host,
            address.port,
            _reason(error),
        )
        _close(sock)
        background.put((address, None))
    except BaseException:
        _close(sock)
        raise
    else:
        background.put((address, sock))


def _tune(sock: socket.socket) -> None:
    """Send every frame at once, and notice an end that vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, name, value)


def _reason(error: Exception) -> str:
    return "it does not answer in time" if isinstance(error, TimeoutError) else str(error)


def _close_listener(background: _Background, sock: socket.socket) -> None:
    background.close()
    sock.close()


def _close(sock: socket.socket | None) -> None:
    if sock is not None:
        sock.close()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped; then cancel what is left in it."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
