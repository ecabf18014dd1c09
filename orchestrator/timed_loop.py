"""An event loop that knows how long it had nothing to do."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any


class _TimedSelector(selectors.DefaultSelector):
    """Notes how long it waits.

    Attributes:
        waited_s: In all waits so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:  # something is ready to run
            return super().select(timeout)
        began_s = time.monotonic()
        ready = super().select(timeout)
        self.waited_s += time.monotonic() - began_s
        return ready


class TimedLoop(asyncio.SelectorEventLoop):
    """An event loop that knows how long it had nothing to do."""

    def __init__(self) -> None:
        self._timed = _TimedSelector()
        super().__init__(self._timed)

    def idle_s(self) -> float:
        """Return how long the loop has waited since it was made, seconds."""
        return self._timed.waited_s


def idle_clock() -> Callable[[], float] | None:
    """Return `TimedLoop.idle_s` of the running loop; None if it is another kind of loop."""
    loop: Any = asyncio.get_running_loop()
    return loop.idle_s if isinstance(loop, TimedLoop) else None
