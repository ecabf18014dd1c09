"""Which targets a draft may be told to connect to; a `DraftOpen` that names another one is refused.

Only the orchestrator of the deployment can send one. Where that is not enough, because somebody may
take over the orchestrator, the draft is told its targets by its own configuration as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shared.errors import ConfigError, InvalidArgumentError
from shared.messages import DraftOpen
from shared.messages.batches import Batch
from shared.rpc.status import failure_of

logger = logging.getLogger(__name__)

LOOKUP_INTERVAL_S = 3.0

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Lookup = Callable[[str], set[str]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One of the targets that are allowed.

    Args:
        host: A name, an address or a network (10.0.0.0/8).
        port: None: any.
    """

    host: str
    port: int | None


def look_up(name: str) -> set[str]:
    """Return every address of a name, empty while it is unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(sockaddr[0]) for *_, sockaddr in found}


class AllowedTargets:
    """The targets of `--targets`; without any, every one is allowed.

    Args:
        text: Comma-separated HOST or HOST:PORT.
        look_up: Finds the addresses of a name; may block.
    Raises: ConfigError that names the entry.
    """

    def __init__(self, text: str, *, look_up: Lookup = look_up) -> None:
        self._entries = [_parse(part.strip()) for part in text.split(",") if part.strip()]
        self._look_up = look_up
        self._names = {entry.host for entry in self._entries if _network_of(entry.host) is None}
        self._found: dict[str, set[str]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look names up again and again from now on, beside the event loop."""
        if self._names:
            self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def filter(self, batch: Batch[Any]) -> Batch[Any]:
        """Return a batch whose opens name allowed targets; the others are rejected in it."""
        if not self._entries:
            return batch
        messages, rejected = [], list(batch.rejected)
        for message in batch.messages:
            try:
                if isinstance(message, DraftOpen):
                    self.check(message)
            except InvalidArgumentError as error:
                logger.warning("refused request %s: %s", message.request_id, error.message)
                ids = {"request_id": message.request_id, "draft_epoch": message.draft_epoch}
                rejected.append(failure_of(error, **ids, target_epoch=message.target_epoch))
            else:
                messages.append(message)
        return replace(batch, messages=messages, rejected=rejected)

    def check(self, message: DraftOpen) -> None:
        """Check both addresses that a draft may connect to.

        Raises: InvalidArgumentError that names the field.
        """
        host, port = _split(message.target_address)
        if not self._has(host, port):
            raise _not_allowed(message.target_address, "target_address")
        peer_host, _ = _split(message.target_peer_address.partition("/")[0])
        if peer_host and peer_host != host and not self._has(peer_host, None):
            raise _not_allowed(message.target_peer_address, "target_peer_address")

    def _has(self, host: str, port: int | None) -> bool:
        """Return whether some entry allows a place; None: of the channels between engines."""
        return any(
            (entry.port is None or port is None or entry.port == port)
            and self._is_at(entry.host, host)
            for entry in self._entries
        )

    def _is_at(self, allowed: str, host: str) -> bool:
        if allowed == host or host in self._found.get(allowed, ()):
            return True
        network, address = _network_of(allowed), _network_of(host)
        if network is None or address is None or network.version != address.version:
            return False
        return address.subnet_of(network)  # type: ignore[arg-type]  # of the same version

    async def _follow(self) -> None:
        while True:
            for name in self._names:
                found = await asyncio.to_thread(self._look_up, name)
                if found:  # a name service that fails takes no target away
                    self._found[name] = found
            await asyncio.sleep(LOOKUP_INTERVAL_S)


def _not_allowed(address: str, field: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"this draft connects to no target at {address!r}; add it to its --targets",
        reason="TARGET_NOT_ALLOWED",
        field=field,
    )


def _parse(text: str) -> _Entry:
    host, port = _split(text)
    if not host or (port is not None and not 1 <= port <= 65535):
        raise ConfigError(f"--targets holds {text!r}, expected HOST or HOST:PORT")
    return _Entry(host, port)


def _split(text: str) -> tuple[str, int | None]:
    """Return host and port of HOST, HOST:PORT, [IPV6] or [IPV6]:PORT; -1: it is no port."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or _network_of(text) is not None:
        return text.strip("[]"), None
    return host.strip("[]"), int(port) if port.isdecimal() else -1


def _network_of(host: str) -> Network | None:
    """Return the network that a host is, an address is one of itself; None: it is a name."""
    try:
        return ipaddress.ip_network(host)
    except ValueError:
        return None
