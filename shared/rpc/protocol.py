"""Which versions of Coppice's own protocol work together: those at most one apart.

Workers say theirs in WorkerInfo and PeerAttach, who calls a worker in the metadata of the call.
Raise PROTOCOL_VERSION with a release whose processes say, or expect, what the release before does
not; whoever is two releases behind is then refused by name instead of misunderstood.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.errors import StaleStateError

PROTOCOL_VERSION = 1
_KEY = "coppice-protocol"
METADATA = ((_KEY, str(PROTOCOL_VERSION)),)
"""What a call to a worker carries. Without it, the caller is of release 0.1.0: version 0."""


def protocol_problem(version: int, *, who: str, other: int = PROTOCOL_VERSION) -> str:
    """Say why a process of another protocol version must not be worked with, or "".

    Args:
        who: Whose version it is, for the message.
        other: The version of who would work with it; this process's own by default.
    """
    if abs(version - other) <= 1:
        return ""
    return (
        f"{who} speaks protocol version {version}, which does not work together with version "
        f"{other}: versions may be one apart. Upgrade the older one first"
    )


def check_protocol(version: int, *, who: str) -> None:
    """Raise StaleStateError unless a process of this protocol version can be worked with."""
    problem = protocol_problem(version, who=who)
    if problem:
        raise StaleStateError(problem, reason="PROTOCOL_MISMATCH")


def check_caller(metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Raise StaleStateError unless who calls a worker can be worked with.

    Args:
        metadata: Of the call.
    """
    said = next((value for key, value in metadata or () if key == _KEY), "0")
    version = int(said) if isinstance(said, str) and said.isdecimal() else -1
    check_protocol(version, who="the caller")
