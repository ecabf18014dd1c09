"""Work on several outputs' matchers at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

# Of hosts that have cores to spare; the library lets other threads run while it works.
_LEAST_CORES = 8


class MatcherThreads:
    """Threads that are started when there is work for several; one matcher is one thread's."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def map(self, work: Callable[..., Result], *columns: Sequence[Any]) -> Iterable[Result]:
        """Return what a function gives for each output, at once where cores are free."""
        if len(columns[0]) == 1 or len(os.sched_getaffinity(0)) < _LEAST_CORES:
            return map(work, *columns)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_LEAST_CORES // 2, "token masks")
        return self._pool.map(work, *columns)
