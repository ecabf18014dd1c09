"""What an engine did since it was ready that only its start should do.

A kernel that is compiled or loaded, and a graph that is captured, stop an engine for milliseconds
or seconds; a step that is launched kernel by kernel leaves a GPU waiting for Python.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from triton import knobs

from shared.kernels.dispatch import num_eager_launches
from shared.step.graphs import GraphCache


class ServingCounts:
    """Counts from `begin` on; all 0 before.

    Args:
        graphs: Of the engine.
    """

    def __init__(self, graphs: GraphCache) -> None:
        self._graphs = graphs
        self._loads = _watch_loads()
        self._at_begin: tuple[int, int, int] | None = None

    def begin(self) -> None:
        """Count from now on; the engine is about to serve."""
        self._graphs.is_serving = True
        self._at_begin = self._totals

    @property
    def num_compiles(self) -> int:
        """Return the kernels that were compiled, or loaded from the compiler's cache."""
        return self._since_begin(0)

    @property
    def num_captures(self) -> int:
        """Return the graphs that were captured."""
        return self._since_begin(1)

    @property
    def num_eager_launches(self) -> int:
        """Return the launches of operations outside of graphs, see `num_eager_launches` there."""
        return self._since_begin(2)

    def _since_begin(self, place: int) -> int:
        if self._at_begin is None:
            return 0
        return self._totals[place] - self._at_begin[place]

    @property
    def _totals(self) -> tuple[int, int, int]:
        return self._loads.count, self._graphs.num_captures, num_eager_launches()


class _Loads:
    """Counts the binaries that Triton has loaded onto a device in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def note(self, *_: Any, **__: Any) -> None:
        with self._lock:
            self.count += 1


@cache
def _watch_loads() -> _Loads:
    """Begin to count, once in this process."""
    loads = _Loads()
    knobs.runtime.kernel_load_start_hook.add(loads.note)
    return loads
