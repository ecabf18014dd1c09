"""Whether memory grows is judged from samples: what is flat passes, what leaks does not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from benchmarks.soak_memory import INTERVAL_S, Life, growth

pytestmark = pytest.mark.timeout(300)

HOUR_S = 3600
WARM_UP_S = 600


def life(rss: Callable[[float], float], num_fds: Callable[[float], int] = lambda at_s: 20) -> Life:
    """Return two hours of a process.

    Args:
        rss: MiB by time, seconds.
        num_fds: By time, seconds.
    """
    times = [INTERVAL_S * index for index in range(round(2 * HOUR_S / INTERVAL_S))]
    samples = [(at_s, rss(at_s), rss(at_s) / 2, num_fds(at_s), 3) for at_s in times]
    return Life(pid=7, role="target-1 engine", samples=samples)


def found(one: Life) -> list[str]:
    """Return what grows of a process after its warm-up."""
    summary = one.summary(WARM_UP_S)
    assert summary is not None
    return growth(summary)


def test_noise_steps_that_go_back_and_a_warm_up_are_flat() -> None:
    rng = random.Random(1)
    assert found(life(lambda at_s: 80 + rng.uniform(-3, 3))) == []
    assert found(life(lambda at_s: 80 + 10 * (at_s > 2000) * (at_s < 3000))) == []
    assert found(life(lambda at_s: 900 - 200 * math.exp(-at_s / 100))) == []


def test_a_leak_is_found_also_a_slow_one_under_noise() -> None:
    rng = random.Random(2)
    leak = found(life(lambda at_s: 80 + 3 * at_s / HOUR_S + rng.uniform(-3, 3)))
    assert len(leak) == 2 and "target-1 engine (7): rss_mib grows by" in leak[0]


def test_descriptors_that_are_never_closed_are_found() -> None:
    (line,) = found(life(lambda at_s: 80.0, lambda at_s: 20 + int(at_s // 600)))
    assert "num_fds was" in line


def test_a_short_life_says_nothing() -> None:
    short = Life(pid=7, role="draft-0 engine", samples=[(0.0, 1.0, 1.0, 1, 1)])
    assert short.summary(0.0) is None and short.length_s == 0


def test_minutes_hold_medians() -> None:
    rows = life(lambda at_s: at_s).per_minute()
    assert len(rows) == 120 and rows[1] == [1, 85.0, 42.5]
