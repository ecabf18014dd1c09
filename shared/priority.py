"""Whose turn it is, by priority and by how long somebody has waited: in one number, seconds.

A level of priority is worth so many seconds of waiting, and no more: a request of priority 0 is
passed by those of priority 1 that come in the `LEVEL_S` seconds after it, and by none that come
later.
"""

from __future__ import annotations

LEVEL_S = 5.0
"""Seconds of waiting that a level of priority stands for."""


def turn_s(arrived_s: float, priority: int) -> float:
    """Return the turn of a request; those of the least come first.

    Args:
        arrived_s: When it came, by the clock of all that are compared.
    """
    return arrived_s - LEVEL_S * priority


def aged(priority: int, waited_s: float) -> int:
    """Return the priority of a request that begins to wait anew, after so long."""
    return priority + int(waited_s / LEVEL_S)
