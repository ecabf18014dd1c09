"""An event loop counts the time that it waits, and no other."""

from __future__ import annotations

import asyncio
import time

from orchestrator.timed_loop import TimedLoop, idle_clock


async def passes(count: int) -> float:
    """Return the idle time of passes in each of which something is ready."""
    idle_s = idle_clock()
    assert idle_s is not None
    before_s = idle_s()
    for _ in range(count):
        time.sleep(1e-4)
        await asyncio.sleep(0)
    return idle_s() - before_s


async def rest(seconds: float) -> float:
    """Return the idle time of a wait."""
    idle_s = idle_clock()
    assert idle_s is not None
    before_s = idle_s()
    await asyncio.sleep(seconds)
    return idle_s() - before_s


def test_a_loop_that_always_has_something_to_do_is_never_idle() -> None:
    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        assert runner.run(passes(50)) == 0.0


def test_a_loop_that_waits_is_idle() -> None:
    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        assert runner.run(rest(0.05)) > 0.04


def test_another_kind_of_loop_has_no_such_clock() -> None:
    async def clock() -> object:
        return idle_clock()

    with asyncio.Runner() as runner:
        assert runner.run(clock()) is None
