"""What an engine counts in its steps, and says about itself when it is asked."""

from __future__ import annotations

from collections.abc import Sequence

from shared.metrics.samples import Samples, histogram, stage_seconds
from shared.metrics.tally import StageClock, Tally

ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
REQUEST_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STEP_BOUNDS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)


class EngineTallies:
    """What both kinds of engines count in the same way.

    Args:
        stages: Names of the stages of a step.
    """

    def __init__(self, stages: Sequence[str]) -> None:
        self.clock = StageClock(stages)
        self._rows = Tally(ROW_BOUNDS)
        self._requests = Tally(REQUEST_BOUNDS)
        self.step_s = Tally(STEP_BOUNDS_S)

    def note_batch(self, num_rows: int, num_requests: int) -> None:
        """Count a step by what it computes."""
        self._rows.add(num_rows)
        self._requests.add(num_requests)

    @property
    def samples(self) -> Samples:
        """Return the counts by name."""
        clock = self.clock
        busy_s = sum(clock.ns.values()) / 1e9
        return {
            **dict(histogram("coppice_batch_rows", self._rows)),
            **dict(histogram("coppice_batch_requests", self._requests)),
            **dict(histogram("coppice_step_seconds", self.step_s)),
            **dict(stage_seconds("coppice_step_stage_seconds_total", clock)),
            "coppice_engine_busy_seconds_total": busy_s,
        }
