"""What the parts of a target engine share: its requests, its answers, and who it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shared.messages import WorkerInfo
from shared.metrics.engine import EngineTallies
from shared.metrics.samples import Samples, counted
from shared.peer.ring import FeatureRing
from shared.step.recorder import Recorder
from target_service.features import FeatureOutlet
from target_service.request import DeviceTree, HostTree, QueuedRound, TargetRequest

ROUND_SOURCES = ("device", "peer", "relayed", "grammar", "root_only")
STAGES = ("plan", "pack", "launch", "wait", "commit", "send", "learn")


@dataclass(slots=True, kw_only=True)
class StepCounts:
    """What was done since the start.

    Args:
        moved_rounds: Rounds whose accepted path was not contiguous.
        rounds: Rounds launched, by where their trees come from.
        late_trees: Rounds whose tree was not in the mailbox in time.
        retractions: Requests that made room for older ones.
        mailbox_rows: Feature rows that the device posted for drafts.
        busy_ns: Time with a step in flight.
    """

    steps: int = 0
    rows: int = 0
    request_steps: int = 0
    moved_rounds: int = 0
    rounds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROUND_SOURCES, 0))
    late_trees: int = 0
    retractions: int = 0
    mailbox_rows: int = 0
    busy_ns: int = 0
    tallies: EngineTallies = field(default_factory=lambda: EngineTallies(STAGES))
    _free_ns: int = 0  # when the step before this one was read

    def note_launch(
        self, requests: Sequence[TargetRequest], *, num_rows: int, num_requests: int
    ) -> None:
        """Count a step that was launched.

        Args:
            requests: Whose rounds are in it, prefills left out; still queued.
            num_requests: Those with prompt chunks and replays included.
        """
        self.steps += 1
        self.rows += num_rows
        self.request_steps += num_requests
        self.tallies.note_batch(num_rows, num_requests)
        for request in requests:
            self.rounds[_source_of(request.queued)] += 1

    def note_read(self, launched_ns: int, read_ns: int) -> None:
        """Count the time that a step added to those in flight before it."""
        step_ns = read_ns - max(launched_ns, self._free_ns)
        self._free_ns = read_ns
        self.busy_ns += step_ns
        self.tallies.step_s.add(step_ns / 1e9)

    @property
    def samples(self) -> Samples:
        """Return the counts by name, but for those that every WorkerLoad has."""
        return {
            **self.tallies.samples,
            **dict(counted("coppice_engine_rounds_total", "source", self.rounds)),
            "coppice_late_trees_total": self.late_trees,
            "coppice_retractions_total": self.retractions,
            "coppice_device_busy_seconds_total": self.busy_ns / 1e9,
        }


def _source_of(queued: QueuedRound | None) -> str:
    if isinstance(queued, DeviceTree):
        return "device"
    if isinstance(queued, HostTree):
        return queued.source
    return "root_only"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Made once; its parts change.

    Args:
        info: Identity and limits.
        requests: By request_id.
        outbox: Answers of the next step.
        turns: Counts admissions and queued rounds of all kinds.
    """

    info: WorkerInfo
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
