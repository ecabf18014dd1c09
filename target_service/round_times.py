"""How long each stage of a timed round took, from the marks of the step that computed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages import AnswerTimes, StageTime
from shared.step.recorder import Recorder
from shared.step.step_timer import StepTimer
from target_service.request import TargetRequest

# Stages of a step in which the devices exchange trees, as the answer names them.
_DEVICE_STAGES = {"take": "channel", "forward": "forward", "sample": "sample"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStages:
    """A step that was read.

    Args:
        stages: Empty if no request of the step is timed.
        began_ns: When the host began it.
        was_free_ns: When the device had left the timed step before; 0: it was not timed.
    """

    stages: Sequence[StageTime]
    began_ns: int
    was_free_ns: int


class RoundTimes:
    """Makes the times of answers out of records and steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.device_free_ns = 0  # when the last step, if timed, had left the device

    def end_step(self, timer: StepTimer) -> StepStages:
        """Return the stages of a step that was read."""
        was_free_ns = self.device_free_ns
        stages = timer.stages(device_free_ns=was_free_ns)
        self.device_free_ns = timer.device_end_ns(stages)
        return StepStages(stages=stages, began_ns=timer.begin_ns, was_free_ns=was_free_ns)

    def of_answer(
        self, request: TargetRequest, step: StepStages, *, is_device_round: bool
    ) -> AnswerTimes | None:
        """Return how the round that a request has just committed went: from its order on, or else
        from its step on; None: it is not timed, as no prefill is.
        """
        if not request.open.is_timed or not request.round_idx:
            return None
        recorder, key = self._recorder, (request.request_id, request.round_idx)
        if is_device_round:
            self._record_device_round(key, step)
            return recorder.take(*key)
        if recorder.has_begun(*key):
            recorder.stage(*key, "queue", step.began_ns)
        else:
            recorder.begin(*key, step.began_ns)
        recorder.stages(*key, step.stages)
        recorder.stage(*key, "commit")
        return recorder.take(*key)

    def _record_device_round(self, key: tuple[str, int], step: StepStages) -> None:
        """Record a round that the devices did by themselves: from the end of the step before, or
        from the launch if that step was not timed, to the end of this step, of the device.
        """
        self._recorder.begin_earlier(*key, step.was_free_ns or step.began_ns)
        for stage in step.stages:
            if stage.name in _DEVICE_STAGES:
                self._recorder.stage(*key, _DEVICE_STAGES[stage.name], stage.end_ns)
