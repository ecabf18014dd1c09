"""The engine process's loop: what it tells its front, and when."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple

import pytest

from shared.memory import TRIM_INTERVAL_S
from shared.messages import WorkerInfo, WorkerLoad
from shared.rpc import engine_main
from shared.rpc.engine import EngineReport
from shared.rpc.engine_main import REPORT_DELAY_S, run_engine
from shared.rpc.pipe import BlockingPipe
from tests.fakes import FakeTarget
from tests.fakes.engine import BareEngine


class Scripted(BareEngine):
    """An engine that gives these outputs, one list per step, after its first message.

    Args:
        step_s: How long a step takes on the clock.
        num_running: What it says of its load.
    """

    def __init__(
        self, clock: Clock, steps: list[list[Any]], *, step_s: float = 0.0, num_running: int = 1
    ) -> None:
        self._clock = clock
        self._todo = steps
        self._step_s = step_s
        self._num_running = num_running
        self._steps: list[list[Any]] = []

    @property
    def info(self) -> WorkerInfo:
        return FakeTarget().info

    @property
    def has_work(self) -> bool:
        return bool(self._steps)

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(num_running=self._num_running, num_rows=len(self._steps))

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
    """Gives one batch of messages per wait, then ends; `polls` are the answers of `poll`.

    Args:
        poll_s: How long a poll takes on the clock that finds messages.
    """

    def __init__(
        self, clock: Clock, batches: list[list[Any]], polls: list[bool], *, poll_s: float
    ) -> None:
        self.reports: list[EngineReport] = []
        self.spins: list[float] = []
        self._clock = clock
        self._batches = batches
        self._arrived: list[list[Any]] = []
        self._polls = polls
        self._poll_s = poll_s

    def send(self, report: EngineReport) -> None:
        self.reports.append(report)

    def poll(self, timeout_s: float | None, others: Mapping[int, int]) -> bool:
        if timeout_s is None:
            return self._wait()
        assert timeout_s <= REPORT_DELAY_S
        has_news = self._polls.pop(0) if self._polls else False
        self._clock.now += self._poll_s if has_news else timeout_s
        return has_news and self._wait()

    def spin(self, duration_s: float, others: Mapping[int, int]) -> bool:
        self.spins.append(duration_s)
        self._clock.now += duration_s
        return False

    def receive(self) -> list[Any]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def _wait(self) -> bool:
        if not self._batches:
            raise EOFError
        self._arrived = [self._batches.pop(0)]
        return True


def run(
    monkeypatch: pytest.MonkeyPatch,
    *,
    steps: list[list[Any]],
    batches: list[list[Any]],
    polls: list[bool] | None = None,
    step_s: float = 0.0,
    poll_s: float = 0.0,
) -> list[EngineReport]:
    clock = Clock()
    monkeypatch.setattr(engine_main.time, "monotonic", clock.monotonic)
    pipe = ScriptedPipe(clock, batches, polls or [], poll_s=poll_s)
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


class Attached(Scripted):
    """A draft says something in every step, and its front something that follows from it."""

    said: tuple[str, ...] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[str] = []

    def submit(self, message: Any) -> None:
        self.seen.append(message)
        super().submit(message)

    @property
    def channels(self) -> Any:
        return self

    events: ClassVar[dict[int, int]] = {}

    def flush(self) -> None:
        """Say nothing."""

    def receive(self) -> list[tuple[Any, str]]:
        said, self.said = self.said, ()
        return [(self, message) for message in said]

    def submit_peer(self, channel: Any, message: Any) -> None:
        self.seen.append(message)

    def step(self) -> list[Any]:
        self.said = ("open",)
        return super().step()


def test_what_a_channel_says_comes_before_what_follows_from_it() -> None:
    """A target forgets leave to order trees of a draft that it has not heard of."""
    clock = Clock()
    engine = Attached(clock, [["a"]])
    pipe = ScriptedPipe(clock, [["go"], ["credit"]], [], poll_s=0.0)
    with pytest.raises(EOFError):
        run_engine(engine, pipe)  # type: ignore[arg-type]
    assert engine.seen == ["go", "open", "credit"]


class Opening(NamedTuple):
    request_id: str


class Preparing(Attached):
    """Prepares openings until the front says "prepared"."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._preparation: Future[None] = Future()

    def prepare(self, message: Any) -> Future[None] | None:
        is_slow = isinstance(message, Opening) and not self._preparation.done()
        return self._preparation if is_slow else None

    def submit(self, message: Any) -> None:
        super().submit(message)
        if message == "prepared":
            self._preparation.set_result(None)


def test_other_messages_and_steps_go_on_while_an_opening_is_prepared() -> None:
    clock = Clock()
    engine = Preparing(clock, [["a"], ["b"]])
    batches: list[list[Any]] = [[Opening("slow"), "x"], ["go"], ["prepared"]]
    pipe = ScriptedPipe(clock, batches, [False, True, False, True], poll_s=0.0)
    with pytest.raises(EOFError):
        run_engine(engine, pipe)  # type: ignore[arg-type]
    assert engine.seen == ["x", "go", "open", "open", "prepared", Opening("slow")]
    outputs = [output for report in pipe.reports for output in report.outputs]
    assert outputs == ["a", "b"] and pipe.reports[-1].num_received == 4


class Unchanging(Scripted):
    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(num_running=1)


def test_that_work_is_over_is_reported_even_if_nothing_else_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the front would believe that the engine is stuck in it."""
    clock = Clock()
    monkeypatch.setattr(engine_main.time, "monotonic", clock.monotonic)
    pipe = ScriptedPipe(clock, [["go"]], [], poll_s=0.0)
    with pytest.raises(EOFError):
        run_engine(Unchanging(clock, [["a"], []]), pipe)  # type: ignore[arg-type]
    assert [report.has_work for report in pipe.reports] == [False, True, False]


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


def test_messages_that_never_cease_do_not_make_an_engine_look_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: list[list[Any]] = [["x"] for _ in range(50)]
    polls = [True] * 50
    reports = run(monkeypatch, steps=[], batches=batches, polls=polls, poll_s=REPORT_DELAY_S / 5)
    received = [report.num_received for report in reports]
    assert len(received) >= 8 and received[-1] > 40
    assert max(b - a for a, b in zip(received, received[1:], strict=False)) <= 6


@pytest.mark.parametrize(
    ("busy_poll_s", "num_running", "spins"), [(0.001, 1, [0.001] * 2), (0.001, 0, []), (0.0, 1, [])]
)
def test_an_engine_spins_only_when_told_to_and_while_requests_run(
    busy_poll_s: float, num_running: int, spins: list[float]
) -> None:
    clock = Clock()
    pipe = QuietPipe(clock, [["go"]], [], poll_s=0.0)
    engine = Scripted(clock, [["a"]], num_running=num_running)
    with pytest.raises(EOFError):
        run_engine(engine, pipe, busy_poll_s=busy_poll_s)  # type: ignore[arg-type]
    assert pipe.spins == spins  # before the message, and before the end


def test_what_is_urgent_is_reported_before_a_spin_and_holds_no_message_up() -> None:
    clock = Clock()
    pipe = QuietPipe(clock, [["go"]], [], poll_s=0.0)
    num_reports_at_spin: list[int] = []

    def spin(duration_s: float, others: Mapping[int, int]) -> bool:
        num_reports_at_spin.append(len(pipe.reports))
        return pipe.poll(None, others)

    pipe.spin = spin  # type: ignore[method-assign]
    with pytest.raises(EOFError):
        run_engine(Scripted(clock, [], num_running=1), pipe, busy_poll_s=0.01)  # type: ignore[arg-type]
    # The first report is urgent; that of the message can wait, and a message would come first.
    assert num_reports_at_spin == [1, 1]


def test_a_spin_ends_with_the_first_message_or_in_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pipe = BlockingPipe(theirs)
        assert not pipe.spin(0.001, {})
        BlockingPipe(ours).send("here")
        assert pipe.spin(3600.0, {})
        assert pipe.receive() == ["here"]


class Patient(Scripted):
    """Holds each step back for a while; every look at it takes time."""

    def __init__(self, clock: Clock, steps: list[list[Any]], *, wait_s: float) -> None:
        super().__init__(clock, steps)
        self._wait_s = wait_s
        self._begins_at = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._steps) and not self._left_s()

    @property  # type: ignore[override]
    def has_work_in_s(self) -> float | None:
        return self._left_s() or None if self._steps else None

    def submit(self, message: Any) -> None:
        super().submit(message)
        self._begins_at = self._clock.now + self._wait_s

    def step(self) -> list[Any]:
        self._begins_at = self._clock.now + self._wait_s
        return super().step()

    def _left_s(self) -> float:
        self._clock.now += 0.001
        return max(0.0, self._begins_at - self._clock.now)


class QuietPipe(ScriptedPipe):
    """Nothing comes for a second, so that a report is due at once."""

    def _wait(self) -> bool:
        self._clock.now += 1.0
        return super()._wait()


@pytest.mark.parametrize("wait_ms", range(12))
def test_work_that_begins_in_a_while_is_not_slept_through(
    monkeypatch: pytest.MonkeyPatch, wait_ms: int
) -> None:
    """Whichever look at the engine that moment falls between."""
    clock = Clock()
    monkeypatch.setattr(engine_main.time, "monotonic", clock.monotonic)
    pipe = QuietPipe(clock, [["go"]], [], poll_s=0.0)
    engine = Patient(clock, [["a"], ["b"]], wait_s=wait_ms / 1e3 + 0.0005)
    with pytest.raises(EOFError):
        run_engine(engine, pipe)  # type: ignore[arg-type]
    answers = [(report.outputs, report.has_work) for report in pipe.reports if report.outputs]
    assert answers == [(["a"], True), (["b"], False)]


class Rare(ScriptedPipe):
    """Messages that come one by one, long after each other."""

    def _wait(self) -> bool:
        self._clock.now += 0.6 * TRIM_INTERVAL_S
        return super()._wait()


@pytest.mark.parametrize(("num_running", "num_trims"), [(0, 3), (1, 0)])
def test_an_engine_without_requests_gives_memory_back_now_and_then(
    monkeypatch: pytest.MonkeyPatch, num_running: int, num_trims: int
) -> None:
    trims: list[float] = []
    clock = Clock()
    monkeypatch.setattr(engine_main.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(engine_main, "return_free_memory", lambda: trims.append(clock.now))
    pipe = Rare(clock, [["x"]] * 4, [], poll_s=0.0)
    with pytest.raises(EOFError):
        run_engine(Scripted(clock, [], num_running=num_running), pipe)  # type: ignore[arg-type]
    assert len(trims) == num_trims
