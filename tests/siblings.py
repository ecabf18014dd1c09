"""Orchestrator processes that share a port, in one."""

from __future__ import annotations

from orchestrator.siblings import MAX_WORKERS, SharedLoads, Siblings, shared_words


def some_siblings(count: int, *, num_places: int = 1) -> list[Siblings]:
    """Return what so many processes know of each other.

    Args:
        num_places: Of each of them.
    """
    counts, holders = shared_words(count), shared_words(count * num_places)
    workers, loads = (shared_words(count * MAX_WORKERS) for _ in range(2))
    return [
        Siblings(
            parent_pid=0,
            index=index,
            counts=counts,
            holders=holders,
            loads=SharedLoads(index=index, workers=workers, counts=loads),
            directory="",
        )
        for index in range(count)
    ]
