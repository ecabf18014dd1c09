"""The engine process's loop: what it tells its front, and when."""

from __future__ import annotations

from typing import Any

import pytest

from shared.rpc import engine_main
from shared.rpc.engine import EngineReport
from shared.rpc.engine_main import REPORT_DELAY_S, run_engine
from shared.types import WorkerInfo, WorkerLoad
from tests.fakes import FakeTarget


class Scripted:
    """An engine that gives these outputs, one list per step, after its first message.

    Args:
        step_s: How long a step takes on the clock.
    """

    def __init__(self, clock: Clock, steps: list[list[Any]], *, step_s: float) -> None:
        self._clock = clock
        self._todo = steps
        self._step_s = step_s
        self._steps: list[list[Any]] = []

    @property
    def info(self) -> WorkerInfo:
        return FakeTarget().info

    @property
    def has_work(self) -> bool:
        return bool(self._steps)

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(num_running=1, num_rows=len(self._steps))

    def submit(self, message: Any) -> None:
        if message == "go":
            self._steps = self._todo

    def step(self) -> list[Any]:
        self._clock.now += self._step_s
        return self._steps.pop(0)

    def check_integrity(self) -> None:
        """There is nothing to check."""


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class ScriptedPipe:
    """Gives one batch of messages per wait, then ends; `polls` are the answers of `poll`."""

    def __init__(self, batches: list[list[Any]], polls: list[bool]) -> None:
        self.reports: list[EngineReport] = []
        self._batches = batches
        self._polls = polls

    def send(self, report: EngineReport) -> None:
        self.reports.append(report)

    def poll(self, timeout_s: float) -> bool:
        assert timeout_s == REPORT_DELAY_S
        return self._polls.pop(0)

    def receive(self, *, wait: bool) -> list[Any]:
        if not wait:
            return []
        if not self._batches:
            raise EOFError
        return [self._batches.pop(0)]


def run(
    monkeypatch: pytest.MonkeyPatch,
    *,
    steps: list[list[Any]],
    batches: list[list[Any]],
    polls: list[bool] | None = None,
    step_s: float = 0.0,
) -> list[EngineReport]:
    clock = Clock()
    monkeypatch.setattr(engine_main.time, "monotonic", clock.monotonic)
    pipe = ScriptedPipe(batches, polls or [])
    with pytest.raises(EOFError):
        run_engine(Scripted(clock, steps, step_s=step_s), pipe)  # type: ignore[arg-type]
    return pipe.reports[1:]  # the first one says that it is idle


def test_steps_without_an_answer_are_not_reported_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[list[Any]] = [["a"], [], [], [], ["b"], []]
    reports = run(monkeypatch, steps=steps, batches=[["go"]])
    assert [report.outputs for report in reports] == [["a"], ["b"], []]
    assert [report.has_work for report in reports] == [True, True, False]


def test_long_steps_are_reported_as_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[Any]] = [[] for _ in range(5)]
    reports = run(monkeypatch, steps=steps, batches=[["go"]], step_s=REPORT_DELAY_S)
    assert [report.load.num_rows for report in reports] == [4, 3, 2, 1, 0]


def test_messages_that_were_only_taken_are_reported_once_nothing_else_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: list[list[Any]] = [["x"], ["x", "x"], ["x"]]
    reports = run(monkeypatch, steps=[], batches=batches, polls=[True, True, False])
    assert [report.num_received for report in reports] == [4]
