"""When an engine counts as hung."""

from __future__ import annotations

import pytest

from shared.rpc.engine_watch import FLOOR_S, STEP_FACTOR, WINDOW_S, EngineWatch

INTERVAL_S = 0.5
LIMIT_S = 60.0


class Scene:
    """An engine that is looked at every interval, on a clock."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.now = 100.0
        self.watch = EngineWatch(limit_s=limit_s, interval_s=INTERVAL_S, now=self.now)

    def passes(self, duration_s: float) -> float:
        """Look until the time is over; return the longest silence that was too long."""
        worst_s = 0.0
        end = self.now + duration_s
        while self.now < end:
            self.now = min(end, self.now + INTERVAL_S)
            worst_s = max(worst_s, self.watch.look(self.now))
        return worst_s

    def steps(self, step_s: float, duration_s: float) -> None:
        """Let the engine step without a pause."""
        self.watch.note_debt(self.now)
        for _ in range(round(duration_s / step_s)):
            assert not self.passes(step_s)
            self.watch.note_report(self.now, owes_more=True)


def test_an_engine_that_owes_nothing_never_hangs() -> None:
    scene = Scene()
    assert not scene.passes(1000.0)
    scene.watch.note_debt(scene.now)
    scene.watch.note_report(scene.now + 0.01, owes_more=False)
    assert not scene.passes(1000.0)


def test_silence_counts_from_the_first_debt() -> None:
    scene = Scene()
    scene.passes(100.0)
    scene.watch.note_debt(scene.now)
    assert not scene.passes(FLOOR_S - 1.0)
    scene.watch.note_debt(scene.now)  # more work for an engine that is silent already
    assert scene.passes(1.5) > FLOOR_S


@pytest.mark.parametrize("step_s", [0.01, 0.5, 1.0, 2.0])
def test_the_deadline_follows_from_the_steps(step_s: float) -> None:
    scene = Scene()
    scene.steps(step_s, 40.0)
    deadline_s = max(FLOOR_S, STEP_FACTOR * step_s)
    assert scene.watch.deadline_s == pytest.approx(deadline_s, abs=0.01)
    assert not scene.passes(deadline_s - 0.6)
    assert scene.passes(1.2) > deadline_s


def test_slow_steps_reach_the_limit_and_no_more() -> None:
    scene = Scene()
    scene.steps(4.0, 60.0)
    assert scene.watch.deadline_s == LIMIT_S
    assert not scene.passes(LIMIT_S)
    assert scene.passes(1.0) > LIMIT_S
    assert Scene(limit_s=2.0).watch.deadline_s == 2.0, "the limit goes before the floor"


def test_long_steps_of_long_ago_do_not_count() -> None:
    scene = Scene()
    scene.steps(2.0, 10.0)
    scene.steps(0.1, WINDOW_S)
    assert scene.watch.deadline_s > FLOOR_S
    scene.steps(0.1, WINDOW_S + 1.0)
    assert scene.watch.deadline_s == FLOOR_S


def test_idle_time_is_no_step() -> None:
    """A peer gives the engine work that the front does not know of."""
    scene = Scene()
    scene.watch.note_debt(scene.now)
    scene.watch.note_report(scene.now + 0.01, owes_more=False)
    scene.passes(30.0)
    scene.watch.note_report(scene.now, owes_more=True)
    assert scene.watch.deadline_s == FLOOR_S


def test_a_compile_has_all_the_time_and_is_no_step() -> None:
    scene = Scene()
    scene.watch.note_debt(scene.now)
    scene.watch.note_report(scene.now, owes_more=True, is_slow=True)
    assert not scene.passes(LIMIT_S - 1.0)
    scene.watch.note_report(scene.now, owes_more=True)
    assert scene.watch.deadline_s == FLOOR_S
    scene.watch.note_report(scene.now, owes_more=True, is_slow=True)
    assert scene.passes(LIMIT_S + 1.0) > LIMIT_S


@pytest.mark.parametrize("is_first_to_look", [True, False])
def test_time_in_which_nobody_ran_does_not_count(is_first_to_look: bool) -> None:  # noqa: FBT001
    """Both processes were stopped, or the machine was."""
    scene = Scene()
    scene.steps(0.1, 10.0)
    scene.now += 600.0
    if is_first_to_look:
        assert not scene.watch.look(scene.now)
    scene.watch.note_report(scene.now, owes_more=True)
    assert scene.watch.deadline_s <= STEP_FACTOR * 2 * INTERVAL_S
    assert not scene.passes(FLOOR_S - 0.6)
