"""When a step is launched behind the one in flight."""

from __future__ import annotations

import pytest

from target_service.launch_time import LaunchTime
from target_service.step_costs import StepCosts
from target_service.warm_up import warm_up
from tests.engines import Models, make_target, run_plain
from tests.local_pair import LocalRequest

COSTS = StepCosts([1, 8], [4e-3, 8e-3])
LAUNCH_S = 1e-3
LEAD_S = 1.5 * LAUNCH_S + 0.5e-3


class Device:
    """Runs steps one after the other, each `beside_s` longer than its forward."""

    def __init__(self, beside_s: float = 0.0) -> None:
        self.now = 100.0
        self.beside_s = beside_s
        self.free_at = 0.0
        self.times = LaunchTime(COSTS, clock=lambda: self.now)

    def launch(self, num_rows: int = 1) -> None:
        began = self.now
        self.now += LAUNCH_S
        self.free_at = max(self.now, self.free_at) + COSTS.of(num_rows) + self.beside_s
        self.times.launched(num_rows, began)

    def finish(self, ends_at: float) -> None:
        was_awaited = ends_at > self.now
        self.now = max(self.now, ends_at)
        self.times.ended(was_awaited=was_awaited)


def run(device: Device, num_steps: int) -> list[float]:
    """Overlap steps as a pipeline does; return how long the device idled before each."""
    idle = []
    if device.free_at <= device.now:
        device.launch()
    for _ in range(num_steps):
        ends_at = device.free_at
        device.now += device.times.delay_s
        idle.append(max(0.0, device.now + LAUNCH_S - ends_at))
        device.launch()
        device.finish(ends_at)
    return idle


def test_nothing_waits_where_nothing_is_in_flight() -> None:
    assert LaunchTime(COSTS).delay_s == 0.0


@pytest.mark.parametrize("beside_s", [0.0, 0.3e-3, 5e-3])
def test_launches_are_late_and_the_device_never_waits(beside_s: float) -> None:
    device = Device(beside_s)
    assert not any(run(device, 100))
    device.finish(device.free_at)
    device.launch()
    delay_s = device.times.delay_s
    assert delay_s == pytest.approx(4e-3 + beside_s - LEAD_S, rel=0.01, abs=1e-5)


def test_steps_that_become_shorter_let_the_device_wait_a_few_times_only() -> None:
    device = Device(5e-3)
    run(device, 100)
    device.beside_s = 0.0
    idle = run(device, 100)
    assert any(idle) and not any(idle[10:])


def test_a_launch_that_takes_longer_than_a_step_is_not_put_off() -> None:
    device = Device()
    device.launch()
    device.finish(device.free_at)
    began = device.now
    device.now += 5e-3
    device.times.launched(1, began)
    assert device.times.delay_s == 0.0


class OneLook(LaunchTime):
    """Delays that are over at the second look."""

    _looks = 0

    def launched(self, num_rows: int, began_s: float) -> None:
        super().launched(num_rows, began_s)
        self._looks = 0

    @property
    def delay_s(self) -> float:
        self._looks += 1
        return 1e-6 if self._looks == 1 else 0.0


def test_a_delay_that_ends_between_two_looks_leaves_no_step_unread(models: Models) -> None:
    target = make_target(models.pairing("standalone"))
    target.scheduler.overlaps_steps = True
    target.pipeline.launch_time = OneLook(COSTS)
    warm_up(target)
    (request,) = run_plain(target, [LocalRequest(prompt=[1, 2, 3], max_new_tokens=9)])
    assert len(request.output) == 9
