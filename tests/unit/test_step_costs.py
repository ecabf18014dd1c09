"""What a forward costs is measured in spite of what else a machine does meanwhile."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from target_service import start_up
from target_service.start_up import measure_costs
from target_service.step_costs import StepCosts

SIZES = (1, 8, 16, 64, 128)


def seconds_of(num_rows: int) -> float:
    """Return what a forward takes that waits for nothing."""
    return 4e-3 + 1e-5 * num_rows


def test_what_took_longer_than_more_rows_did_is_not_believed() -> None:
    costs = StepCosts([1, 16, 32, 64], [3.9, 7.8, 5.7, 4.3])
    assert list(costs.sizes) == [(1, 3.9), (16, 4.3), (32, 4.3), (64, 4.3)]
    assert costs.of(24) == pytest.approx(4.3)


def test_a_slow_moment_is_in_none_of_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may last as long as half of all sizes take."""
    for first_slow in range(3 * len(SIZES)):
        now_s, calls = [0.0], itertools.count()
        slow_calls = range(first_slow, first_slow + len(SIZES) // 2)

        def extend(
            num_rows: int,
            now_s: Any = now_s,
            calls: Any = calls,
            slow_calls: Any = slow_calls,
        ) -> None:
            now_s[0] += seconds_of(num_rows) * (3 if next(calls) in slow_calls else 1)

        runner: Any = SimpleNamespace(
            row_counts=SIZES,
            extend=extend,
            pool=SimpleNamespace(device=torch.device("cpu")),
            model=SimpleNamespace(config=SimpleNamespace(experts=None)),
        )
        monkeypatch.setattr(start_up, "_padding", lambda _, num_rows, *__: num_rows)
        monkeypatch.setattr(start_up.time, "perf_counter", lambda now_s=now_s: now_s[0])
        got = dict(measure_costs(runner).sizes)
        assert got == pytest.approx({size: seconds_of(size) for size in SIZES})
