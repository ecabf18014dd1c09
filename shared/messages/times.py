"""Where the time of one answer went; only of requests that are timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from coppice.v1 import tree_pb2
from shared.messages.codec import message


class StageTime(NamedTuple):
    """What was done or waited for between the end of the previous stage and `end_ns`.

    Args:
        end_ns: Monotonic clock.
    """

    name: str
    end_ns: int


@message(tree_pb2.AnswerTimes)
@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTimes:
    """How a worker spent the time from an order to its answer; see proto AnswerTimes."""

    clock_id: int
    begin_ns: int
    stages: tuple[StageTime, ...] = ()

    @property
    def end_ns(self) -> int:
        """Return the end of the last stage."""
        return self.stages[-1].end_ns if self.stages else self.begin_ns

    def then(self, name: str, end_ns: int) -> AnswerTimes:
        """Return these times and one more stage, which ends no earlier than the last one."""
        stage = StageTime(name=name, end_ns=max(end_ns, self.end_ns))
        return AnswerTimes(
            clock_id=self.clock_id, begin_ns=self.begin_ns, stages=(*self.stages, stage)
        )

    def including(self, kind: str, other: AnswerTimes | None) -> AnswerTimes:
        """Return these times and then the stages of a worker of this `kind` on the same machine."""
        if other is None:
            return self
        times = self.then(f"{kind}: channel", other.begin_ns)
        for stage in other.stages:
            times = times.then(f"{kind}: {stage.name}", stage.end_ns)
        return times
