"""Ports of this machine: whether a service can listen, who has one, and which are free."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable, Iterator

from coppice.health import HealthProbe
from shared.config.ports import LOOPBACK
from shared.errors import ConfigError
from shared.rpc.health_names import ORCHESTRATOR_SERVICE

_EVERYWHERE = {"", "0.0.0.0", "::"}


def require_free(host: str, port: int, *, option: str = "--port") -> None:
    """Raise unless a service can listen there; 0 is any port.

    Raises: ConfigError that says who answers there.
    """
    if not port:
        return
    try:
        _listen_once(host, port)
    except OSError as error:
        where = f"{host}:{port}"
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(
                f"cannot listen on {where}: {error.strerror or error}; "
                f"choose another --host or {option}"
            ) from None
        zero = "any free one" if option == "--port" else "none"
        raise ConfigError(
            f"cannot listen on {where}: {_occupant(host, port)}; stop it, or choose another "
            f"{option} (0 = {zero})"
        ) from None


def require_distinct(ports: Iterable[tuple[str, str, int]]) -> None:
    """Raise unless all can be listened at together.

    Args:
        ports: Option, host and port of each; 0 is any port.
    Raises: ConfigError that names the two options.
    """
    known: list[tuple[str, str, int]] = []
    for option, host, port in ports:
        for other, other_host, other_port in known:
            if port == other_port and (host == other_host or {host, other_host} & _EVERYWHERE):
                raise ConfigError(
                    f"{other} and {option} are both {port}: choose another port for one of them"
                )
        if port > 0:
            known.append((option, host, port))


def is_taken(host: str, port: int) -> bool:
    """Return whether somebody listens there."""
    try:
        _listen_once(host, port)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _listen_once(host: str, port: int) -> None:
    """Listen for a moment. Raises: OSError if that cannot be."""
    family, _, _, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
        probe.bind(address)
        probe.listen()


def _occupant(host: str, port: int) -> str:
    with HealthProbe(f"{dialled(host)}:{port}") as probe:
        status = probe.status(ORCHESTRATOR_SERVICE, timeout_s=5.0)
    if status in ("SERVING", "NOT_SERVING"):
        return "another Coppice server runs there"
    return "another program has the port"


def dialled(host: str) -> str:
    """Return how this machine dials a host that is listened on."""
    return LOOPBACK if host in ("0.0.0.0", "::", "[::]", "") else host


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Reserve distinct free ports for the length of the block."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for reserved in sockets:
            reserved.bind((LOOPBACK, 0))
        yield [reserved.getsockname()[1] for reserved in sockets]
