"""Where the time of timed requests goes: stages of their rounds, by request and round.

An engine tells the recorder what happened to a round: its order came, the draft's answer came, its
step ended. The answer to the round takes the times that are recorded. A request that is not timed
has no record, and every call about it returns at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from shared import times
from shared.messages import AnswerTimes, StageTime
from shared.step.step_timer import StepTimer
from shared.times import clock_id


class Recorder:
    """The records of an engine's timed requests.

    Args:
        device: What the engine's steps run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._records: dict[str, dict[int, AnswerTimes]] = {}  # by request, by round
        self._marks: dict[tuple[str, str], int] = {}  # by request and name
        self._busy_until_ns = 0

    @property
    def is_on(self) -> bool:
        """Return whether any request is timed."""
        return bool(self._records)

    def watch(self, request_id: str) -> None:
        """Record the rounds of a request from now on."""
        self._records[request_id] = {}

    def forget(self, request_id: str) -> None:
        """Drop what is recorded of a request that ends or is opened anew."""
        if self._records.pop(request_id, None) is not None:
            self._marks = {key: at for key, at in self._marks.items() if key[0] != request_id}

    def is_timed(self, request_id: str) -> bool:
        """Return whether a request is recorded."""
        return request_id in self._records

    # --- what happens to a round -----------------------------------------------------------------

    def take_order(self, request_id: str, round_idx: int, received_ns: int) -> None:
        """Begin a round whose order came through the worker's front, and is taken now.

        Args:
            received_ns: When the order reached the worker.
        """
        if request_id in self._records:
            order = times.take(received_ns, busy_until_ns=self._busy_until_ns)
            self._records[request_id][round_idx] = order

    def begin(self, request_id: str, round_idx: int, begin_ns: int = 0) -> None:
        """Begin a round, by default now; one that has begun begins anew."""
        if request_id in self._records:
            record = AnswerTimes(clock_id=clock_id(), begin_ns=begin_ns or time.monotonic_ns())
            self._records[request_id][round_idx] = record

    def begin_earlier(self, request_id: str, round_idx: int, begin_ns: int) -> None:
        """Let a round begin at this time, which may be before or within what is recorded of it."""
        if request_id in self._records:
            known = self._records[request_id].get(round_idx)
            self.begin(request_id, round_idx, begin_ns)
            self.stages(request_id, round_idx, known.stages if known is not None else ())

    def has_begun(self, request_id: str, round_idx: int) -> bool:
        """Return whether anything is recorded of a round."""
        return round_idx in self._records.get(request_id, ())

    def stage(self, request_id: str, round_idx: int, name: str, end_ns: int = 0) -> None:
        """End a stage of a round that has begun, by default now."""
        record = self._records.get(request_id, {}).get(round_idx)
        if record is not None:
            ended = record.then(name, end_ns or time.monotonic_ns())
            self._records[request_id][round_idx] = ended

    def stages(self, request_id: str, round_idx: int, stages: Iterable[StageTime]) -> None:
        """End several stages, such as those of the step that computed the round."""
        if request_id in self._records:
            for name, end_ns in stages:
                self.stage(request_id, round_idx, name, end_ns)

    def include(
        self, request_id: str, round_idx: int, kind: str, answer: AnswerTimes | None
    ) -> None:
        """Add the times of what a `kind` of worker on this machine answered; it may have begun the
        round.
        """
        if answer is None or request_id not in self._records:
            return
        if not self.has_begun(request_id, round_idx):
            self.begin(request_id, round_idx, answer.begin_ns)
        record = self._records[request_id][round_idx]
        self._records[request_id][round_idx] = record.including(kind, answer)

    def mark(self, request_id: str, name: str) -> None:
        """Take note of the time, for a stage that ends at the newest mark of its name."""
        if request_id in self._records:
            self._marks[request_id, name] = time.monotonic_ns()

    def stage_at_mark(self, request_id: str, round_idx: int, name: str) -> None:
        """End a stage at its newest mark; at once if there was none."""
        record = self._records.get(request_id, {}).get(round_idx)
        if record is not None:
            marked_ns = self._marks.get((request_id, name), record.end_ns)
            self._records[request_id][round_idx] = record.then(name, marked_ns)

    def take(self, request_id: str, round_idx: int) -> AnswerTimes | None:
        """Return the times of a round and drop the record, older rounds included.

        Returns: None if the request is not timed or the round has not begun.
        """
        rounds = self._records.get(request_id)
        if not rounds:
            return None
        taken = rounds.get(round_idx)
        self._records[request_id] = {r: record for r, record in rounds.items() if r > round_idx}
        return taken

    # --- steps -----------------------------------------------------------------------------------

    def step(self, request_ids: Iterable[str]) -> StepTimer:
        """Return the clock of a step; it measures if one of these requests is timed."""
        is_on = self.is_on and any(request_id in self._records for request_id in request_ids)
        return StepTimer(self._device, is_on=is_on)

    def end_step(self) -> None:
        """Take note that the engine is free to take orders."""
        self._busy_until_ns = time.monotonic_ns()
