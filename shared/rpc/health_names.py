"""Names for which a service says its health, beside "" (alive) and its full name (ready)."""

from __future__ import annotations


def process_name(pid: int) -> str:
    """Return the name that only the process of this id knows.

    Who starts a service asks for it: another one may have had the port before.
    """
    return f"process/{pid}"
