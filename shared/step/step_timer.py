"""When the parts of one engine step ended, host and device on one clock, without waiting for it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from shared.messages import StageTime


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    name: str
    is_device: bool
    at_ns: int
    event: torch.cuda.Event | None


class StepTimer:
    """Marks of one step; on a GPU each is an event of the stream as well.

    Args:
        is_on: Else nothing is measured and there are no stages.
    """

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self._is_cuda = is_on and device.type == "cuda"
        self.is_on = is_on
        self._marks: list[_Mark] = []
        self.begin_ns = 0
        if is_on:
            self._mark("", is_device=False)
            self.begin_ns = self._marks[0].at_ns

    def host(self, name: str) -> None:
        """End a stage that the host did, or waited for."""
        if self.is_on:
            self._mark(name, is_device=False)

    def device(self, name: str) -> None:
        """End a stage when the device has done what it was given up to here."""
        if self.is_on:
            self._mark(name, is_device=self._is_cuda)

    def stages(self, *, device_free_ns: int = 0) -> tuple[StageTime, ...]:
        """Return the stages; the last one must be the host's, which has waited for the device.

        A device does not say what its clock has to do with the host's, so its first stage is taken
        to begin when the host has launched it, or when the device is free.

        Args:
            device_free_ns: When the device had finished the step before, at the latest.
        """
        stages: list[StageTime] = []
        now_ns = self.begin_ns
        for before, mark in zip(self._marks, self._marks[1:], strict=False):
            if not mark.is_device:
                now_ns = max(now_ns, mark.at_ns)
            else:
                assert before.event is not None and mark.event is not None
                if not before.is_device and device_free_ns > now_ns:
                    now_ns = device_free_ns
                    stages.append(StageTime(name="busy device", end_ns=now_ns))
                now_ns += round(before.event.elapsed_time(mark.event) * 1e6)
            stages.append(StageTime(name=mark.name, end_ns=now_ns))
        return tuple(stages)

    def device_end_ns(self, stages: tuple[StageTime, ...]) -> int:
        """Return when the device was done, by what `stages` returned."""
        names = {mark.name for mark in self._marks if mark.is_device}
        return max((stage.end_ns for stage in stages if stage.name in names), default=0)

    def _mark(self, name: str, *, is_device: bool) -> None:
        event = None
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks.append(
            _Mark(name=name, is_device=is_device, at_ns=time.monotonic_ns(), event=event)
        )
