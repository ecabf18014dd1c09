"""What the parts of a target engine share: its requests, its answers, and who it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shared.messages import WorkerInfo
from shared.peer.ring import FeatureRing
from shared.step.recorder import Recorder
from target_service.features import FeatureOutlet
from target_service.request import TargetRequest


@dataclass(slots=True, kw_only=True)
class StepCounts:
    """What was done since the start.

    Args:
        moved_rounds: Rounds whose accepted path was not contiguous.
    """

    steps: int = 0
    rows: int = 0
    request_steps: int = 0
    moved_rounds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Made once; its parts change.

    Args:
        info: Identity and limits.
        max_context_len: Longest sequence, prompt and output.
        requests: By request_id.
        outbox: Answers of the next step.
        turns: Counts admissions and queued rounds of all kinds.
    """

    info: WorkerInfo
    max_context_len: int
    requests: dict[str, TargetRequest]
    outbox: list[Any]
    recorder: Recorder
    features: FeatureOutlet
    turns: Iterator[int] = field(default_factory=itertools.count)
    counts: StepCounts = field(default_factory=StepCounts)

    @classmethod
    def create(
        cls,
        info: WorkerInfo,
        device: torch.device,
        *,
        max_context_len: int,
        feature_retain_rows: int,
        ring: FeatureRing | None = None,
    ) -> EngineState:
        """Return the state of an engine without requests.

        Args:
            feature_retain_rows: Feature rows kept per request until acknowledged.
            ring: Carries feature rows to drafts on this host.
        """
        requests: dict[str, TargetRequest] = {}
        outbox: list[Any] = []
        return cls(
            info=info,
            max_context_len=max_context_len,
            requests=requests,
            outbox=outbox,
            recorder=Recorder(device),
            features=FeatureOutlet(
                requests, outbox, info.features, retain_rows=feature_retain_rows, ring=ring
            ),
        )

    def is_held(self, request: TargetRequest) -> bool:
        """Return whether a request is still there; it may have gone while a step was in flight."""
        return self.requests.get(request.open.request_id) is request
