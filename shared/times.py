"""Where the time of a timed request goes: stamps of the monotonic clock along an order's way.

All processes of a machine share that clock. Between machines only durations can be compared: what a
round trip took beyond the time at the worker is then split evenly over the two ways.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.messages import AnswerTimes, StageTime

_CLOCK_FILES = (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/timens_offsets"))


@functools.cache
def clock_id() -> int:
    """Return the name of this process's monotonic clock; 0 if it cannot be told from others."""
    try:
        parts = [path.read_bytes() for path in _CLOCK_FILES if path.exists()]
    except OSError:
        return 0
    return int.from_bytes(hashlib.sha256(b"".join(parts)).digest()[:8]) if parts else 0


def take(received_ns: int, *, busy_until_ns: int = 0) -> AnswerTimes:
    """Begin the times of an order that the engine takes now.

    Args:
        received_ns: When the order reached the worker.
        busy_until_ns: When the engine's last step ended; it takes orders between steps.
    """
    times = AnswerTimes(clock_id=clock_id(), begin_ns=received_ns)
    if busy_until_ns > received_ns:
        times = times.then("busy engine", busy_until_ns)
    return times.then("front", time.monotonic_ns())


def leave(answers: Sequence[Any]) -> Sequence[Any]:
    """Return a worker's answers; the times of those that have any end now."""
    if not any(getattr(answer, "times", None) for answer in answers):
        return answers
    now = time.monotonic_ns()
    return [
        replace(answer, times=answer.times.then("answer", now))
        if getattr(answer, "times", None)
        else answer
        for answer in answers
    ]


def seen_from(
    times: AnswerTimes, *, kind: str, sent_ns: int | None, arrived_ns: int
) -> AnswerTimes:
    """Return an answer's times on the asker's clock, both ways included.

    Args:
        kind: Put before the worker's own stages: "target" or "draft".
        sent_ns: When the order left; None: there was none.
        arrived_ns: When the answer came.
    """
    own = clock_id()
    shift = 0
    if times.clock_id != own or not own:
        away_ns = times.end_ns - times.begin_ns
        ways_ns = 0 if sent_ns is None else max(0, arrived_ns - sent_ns - away_ns)
        shift = arrived_ns - ways_ns // 2 - times.end_ns
    begin_ns = times.begin_ns + shift
    seen = AnswerTimes(clock_id=own, begin_ns=begin_ns)
    if sent_ns is not None:
        seen = replace(seen, begin_ns=sent_ns).then(f"{kind}: hop to it", begin_ns)
    stages = (
        StageTime(
            name=stage.name if ": " in stage.name else f"{kind}: {stage.name}",
            end_ns=stage.end_ns + shift,
        )
        for stage in times.stages
    )
    return replace(seen, stages=(*seen.stages, *stages)).then(f"{kind}: hop back", arrived_ns)
