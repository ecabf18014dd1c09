"""AUTO against the envelope of all else that was measured: the best shape or none, by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvelopePoint:
    """What AUTO reaches in a batch.

    Args:
        batch: Requests at once.
        auto: Decode tokens per second.
        best: Of the others, by the one named `name`.
    """

    batch: int
    auto: float
    best: float
    name: str

    @property
    def share(self) -> float:
        """Return what AUTO reaches of the best."""
        return self.auto / self.best


def envelope_of(runs: Sequence[Mapping[str, Any]]) -> Iterator[EnvelopePoint]:
    """Yield what AUTO reaches in each batch that was measured with it and without."""
    speeds: dict[int, dict[str, float]] = {}
    for run in runs:
        if run.get("decode_tokens_per_second"):
            of_batch = speeds.setdefault(run["batch"], {})
            of_batch[run["speculation"]] = run["decode_tokens_per_second"]
    for batch, by_name in speeds.items():
        auto = by_name.pop(AUTO, None)
        if auto is not None and by_name:
            name, best = max(by_name.items(), key=lambda item: item[1])
            yield EnvelopePoint(batch=batch, auto=auto, best=best, name=name)
