"""Channels: engines of a target and a draft, joined by a socket.

What they tell each other in every round goes from engine to engine, without waking their fronts or
the orchestrator. Nothing here blocks: what a socket does not take waits in memory, and an end that
does not read for long is cut off. A channel that breaks loses what was on the way; whoever sees
it goes on without, and the orchestrator drives the rounds.

On one host the target listens at a Unix socket, which is opened here. Between hosts the same frames
go over TCP (tcp.py).
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import DecodeError, Message

from coppice.v1 import peer_pb2
from shared.messages.batches import (
    Batch,
    pack_to_draft,
    pack_to_target,
    unpack_to_draft,
    unpack_to_target,
)
from shared.peer.ring import RING_DIR

logger = logging.getLogger(__name__)

_PREFIX = "coppice-channel-"
_UNBORN_PREFIX = "coppice-unborn-"
_MAX_BIRTH_S = 60.0  # from bind to rename, which takes no time at all
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")
_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 64 << 20
_FRAME_MESSAGES = 32  # of at most 1 MiB each
# More may wait, such as the rows of many long prompts, as long as the other end takes some.
_MAX_BACKLOG_BYTES = 256 << 20
_MAX_SILENCE_S = 5.0
_RECEIVE_BYTES = 1 << 16  # a larger buffer is mapped and unmapped each time
_SOCKET_BYTES = 4 << 20


class PeerChannel:
    """One end of a channel.

    Args:
        pack: Makes the protobuf message of a batch of messages.
        unpack: Its opposite for what the other end sends.
        frame: Type of what the other end sends.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        pack: Callable[[list[Any]], Message],
        unpack: Callable[[Any], Batch[Any]],
        frame: type[Message],
    ) -> None:
        sock.settimeout(0)
        self.shares_memory = sock.family == socket.AF_UNIX
        """Whether the other end is on this host, and reads the target's ring."""
        if self.shares_memory:  # TCP finds the right size by itself
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._socket = sock
        self._pack = pack
        self._unpack = unpack
        self._frame = frame
        self._queued: list[Any] = []
        self._unprepared: list[Callable[[], None]] = []
        self._backlog = bytearray()
        self._taken_at = time.monotonic()  # when the socket took something last
        self._received = bytearray()
        self.is_open = True
        self.fd = sock.fileno()

    @property
    def events(self) -> int:
        """Return what this end waits for, as for `select.poll`."""
        return select.POLLIN | (select.POLLOUT if self._backlog else 0)

    def put(self, message: Any, *, prepare: Callable[[], None] | None = None) -> None:
        """Queue a message for the next `flush`.

        Args:
            prepare: Is called right before, to do what the message says.
        """
        self._queued.append(message)
        if prepare is not None:
            self._unprepared.append(prepare)

    def flush(self) -> None:
        """Send what is queued, in few frames, as far as the socket takes it."""
        queued, self._queued = self._queued, []
        unprepared, self._unprepared = self._unprepared, []
        if not self.is_open:
            return
        for prepare in unprepared:
            prepare()
        for first in range(0, len(queued), _FRAME_MESSAGES):
            data = self._pack(queued[first : first + _FRAME_MESSAGES]).SerializeToString()
            self._backlog += _LENGTH.pack(len(data))
            self._backlog += data
        try:
            while self._backlog:
                del self._backlog[: self._socket.send(self._backlog)]
                self._taken_at = time.monotonic()
        except BlockingIOError:
            silent_s = time.monotonic() - self._taken_at
            if len(self._backlog) > _MAX_BACKLOG_BYTES and silent_s > _MAX_SILENCE_S:
                self._break("the other end does not read")
        except OSError as error:
            self._break(str(error))

    def receive(self) -> list[Any]:
        """Take every complete message that has come."""
        self._read()
        messages: list[Any] = []
        begin = 0
        while self.is_open and len(self._received) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, begin)
            first = begin + _LENGTH.size
            if length > _MAX_FRAME_BYTES:
                self._break(f"a frame of {length} bytes")
            if len(self._received) - first < length:
                break
            begin = first + length
            messages += self._decode(bytes(self._received[first:begin]))
        del self._received[:begin]
        return messages

    def close(self) -> None:
        """Close this end; what is not sent is lost."""
        self.is_open = False
        self._backlog.clear()
        self._socket.close()

    def _read(self) -> None:
        try:
            while self.is_open:
                data = self._socket.recv(_RECEIVE_BYTES)
                if not data:
                    self.close()
                self._received += data
                if len(data) < _RECEIVE_BYTES:
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self._break(str(error))

    def _decode(self, data: bytes) -> list[Any]:
        frame = self._frame()
        try:
            frame.ParseFromString(data)
        except DecodeError as error:
            self._break(f"garbage: {error}")
            return []
        batch = self._unpack(frame)
        if batch.rejected:
            self._break(batch.rejected[0].message)
        return batch.messages

    def _break(self, why: str) -> None:
        logger.warning("cutting a channel: %s", why)
        self.close()


class PeerListener:
    """A target's socket; the file goes when this does.

    Raises: OSError if there is no shared directory.
    """

    def __init__(self, directory: Path = RING_DIR) -> None:
        token = secrets.token_hex(16)
        self.name = _PREFIX + token
        path, unborn = directory / self.name, directory / (_UNBORN_PREFIX + token)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(str(unborn))
            unborn.chmod(0o600)
            self._socket.listen(64)
            unborn.rename(path)  # only now: a socket where nobody listens looks like a dead one's
        except OSError:
            unborn.unlink(missing_ok=True)
            self._socket.close()
            raise
        self._logged: set[int | None] = set()  # errors of `accept` since it worked last
        self.fd = self._socket.fileno()
        self.close = weakref.finalize(self, _close, path, self._socket)

    @property
    def events(self) -> dict[int, int]:
        """Return the descriptor to wait for, and what for, as for `select.poll`."""
        return {self.fd: select.POLLIN}

    def accept(self) -> list[PeerChannel]:
        """Return the channels that drafts have opened since."""
        channels = []
        try:
            while True:
                channels.append(target_end(self._socket.accept()[0]))
                self._logged.clear()
        except BlockingIOError:
            return channels
        except OSError as error:
            if error.errno not in self._logged:  # an engine asks thousands of times per second
                self._logged.add(error.errno)
                logger.warning("a draft cannot open a peer channel: %s", error)
            return channels


@dataclass(frozen=True, slots=True)
class PeerLost:
    """What a channel says last: it broke, or the other end closed it."""


class ChannelSource(Protocol):
    """Where channels come from without being asked for: a listener, or dials that take a while."""

    @property
    def events(self) -> dict[int, int]:
        """Return the descriptors to wait for, and what for, as for `select.poll`."""

    def accept(self) -> list[PeerChannel]:
        """Return the channels that have been opened since; never blocks."""


class PeerChannels:
    """The channels of an engine.

    Args:
        sources: Where channels come from beside `add`.
    """

    def __init__(self, *sources: ChannelSource) -> None:
        self._sources = sources
        self._channels: list[PeerChannel] = []

    def __iter__(self) -> Iterator[PeerChannel]:
        """Yield the channels that are open."""
        return iter(self._channels)

    @property
    def has_sources(self) -> bool:
        """Return whether channels come from anywhere beside `add`."""
        return bool(self._sources)

    @property
    def events(self) -> dict[int, int]:
        """Return the descriptors to wait for, and what for, as for `select.poll`."""
        events = {channel.fd: channel.events for channel in self._channels}
        for source in self._sources:
            events |= source.events
        return events

    def add(self, channel: PeerChannel) -> None:
        """Take a channel that was opened from here."""
        self._channels.append(channel)

    def receive(self) -> list[tuple[PeerChannel, Any]]:
        """Take every message that has come, with its channel; PeerLost is a channel's last."""
        for source in self._sources:
            self._channels += source.accept()
        messages: list[tuple[PeerChannel, Any]] = []
        for channel in list(self._channels):
            messages += [(channel, message) for message in channel.receive()]
            if not channel.is_open:
                self._channels.remove(channel)
                messages.append((channel, PeerLost()))
        return messages

    def flush(self) -> None:
        """Send what is queued on every channel."""
        for channel in self._channels:
            channel.flush()


def connect(name: str, *, directory: Path = RING_DIR) -> PeerChannel:
    """Open a draft's end of a channel.

    Raises: OSError if there is no such target on this host.
    """
    if not is_socket_name(name):
        raise FileNotFoundError(f"{name!r} is no name of a channel")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(str(directory / name))
    except OSError:
        sock.close()
        raise
    return draft_end(sock)


def draft_end(sock: socket.socket) -> PeerChannel:
    """Return a draft's end of a channel."""
    return PeerChannel(
        sock, pack=pack_to_target, unpack=unpack_to_draft, frame=peer_pb2.PeerToDraft
    )


def target_end(sock: socket.socket) -> PeerChannel:
    """Return a target's end of a channel."""
    return PeerChannel(
        sock, pack=pack_to_draft, unpack=unpack_to_target, frame=peer_pb2.PeerToTarget
    )


def is_socket_name(name: str) -> bool:
    """Return whether a name can be that of a channel, and of no other file."""
    return _NAME.fullmatch(name) is not None


def remove_stale_sockets(directory: Path = RING_DIR) -> None:
    """Remove the sockets of targets that were killed: nobody listens there.

    Nor at one that is being made: such are stale only when they are old.
    """
    for path in directory.glob(f"{_PREFIX}*"):
        _remove_if_dead(path)
    for path in directory.glob(f"{_UNBORN_PREFIX}*"):
        with contextlib.suppress(OSError):  # it was born meanwhile
            if time.time() - path.lstat().st_mtime > _MAX_BIRTH_S:
                _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):  # another user's, or gone meanwhile
                path.unlink()
                logger.info("removed %s, which a target left that was killed", path)
        except OSError:
            return


def _close(path: Path, sock: socket.socket) -> None:
    path.unlink(missing_ok=True)
    sock.close()
