"""What an orchestrator process counts: its requests, and the workers that it talks to.

Rounds are counted by each request's own meter. A reader sees the requests that have ended together
with those that run; nothing is added up in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from orchestrator.losses import Loss
from orchestrator.pool import WorkerPool
from shared.messages import SpeculationStats, Timings
from shared.metrics.samples import Samples, counted, histogram, named
from shared.metrics.tally import Tally

FIRST_TOKEN_BOUNDS_S = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
TOKEN_BOUNDS_S = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0),
)
DURATION_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
ROOT_ONLY_REASONS = ("off", "absent", "behind", "resting", "missed", "late")
# What a reader sees before it happens for the first time: a rate begins at 0.
_ENDS = (
    *(("OK", reason) for reason in ("stop", "length", "context_length")),
    *((code, "") for code in ("CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")),
    *((code, "") for code in ("INVALID_ARGUMENT", "UNAVAILABLE", "INTERNAL")),
)
_REBUILDS = (*(("target", loss.name.lower()) for loss in Loss), ("draft", "reopened"))
ACCEPT_BOUNDS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 7.0, 8.0)


class Tracked(Protocol):
    """A request while it is served, as far as it is counted."""

    @property
    def num_prompt_tokens(self) -> int:
        """Return the tokens of its prompt, 0 before it is admitted."""

    @property
    def num_cached_tokens(self) -> int:
        """Return those that a target held already."""

    @property
    def num_output_tokens(self) -> int:
        """Return the tokens sent so far, resumed ones excluded."""

    @property
    def speculation(self) -> SpeculationStats:
        """Return how speculation went so far."""

    @property
    def root_only_reasons(self) -> Mapping[str, int]:
        """Return the rounds without a tree by why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """How a request ended.

    Args:
        code: Name of the gRPC status.
        finish_reason: Of FinishInfo, lower case; "" if it did not finish.
        refused_by: Reason, if it was refused before work began; else "".
        timings, speculation: Of a request that finished.
    """

    code: str
    finish_reason: str = ""
    refused_by: str = ""
    timings: Timings | None = None
    speculation: SpeculationStats | None = None


class _Totals:
    """Sums over requests."""

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.root_only = Counter(dict.fromkeys(ROOT_ONLY_REASONS, 0))
        self.accepted: Counter[int] = Counter()  # rounds by accepted drafts

    def add(self, request: Tracked) -> None:
        """Add what a request has counted."""
        stats, numbers = request.speculation, self.numbers
        numbers["coppice_prompt_tokens_total"] += request.num_prompt_tokens
        numbers["coppice_cached_prompt_tokens_total"] += request.num_cached_tokens
        numbers["coppice_generation_tokens_total"] += request.num_output_tokens
        numbers["coppice_rounds_total"] += stats.num_rounds
        numbers["coppice_draft_tokens_total"] += stats.num_draft_tokens
        numbers["coppice_accepted_tokens_total"] += stats.num_accepted_drafts
        numbers["coppice_moved_rounds_total"] += stats.num_moved_rounds
        self.root_only.update(request.root_only_reasons)
        for num_drafts, num_rounds in enumerate(stats.accept_length_histogram):
            self.accepted[num_drafts] += num_rounds

    def copy(self) -> _Totals:
        """Return the same sums."""
        other = _Totals()
        other.numbers, other.root_only = self.numbers.copy(), self.root_only.copy()
        other.accepted = self.accepted.copy()
        return other

    @property
    def samples(self) -> Samples:
        """Return the sums by name; names without a count yet have 0."""
        names = (
            *("prompt_tokens", "cached_prompt_tokens", "generation_tokens", "rounds"),
            *("draft_tokens", "accepted_tokens", "moved_rounds"),
        )
        return {
            **{name: 0.0 for name in (f"coppice_{name}_total" for name in names)},
            **self.numbers,
            **dict(counted("coppice_root_only_rounds_total", "reason", self.root_only)),
            **dict(self._per_depth()),
        }

    def _per_depth(self) -> Iterator[tuple[str, float]]:
        deepest = max(self.accepted, default=0)
        num_rounds = sum(self.accepted.values())
        for depth in range(1, deepest + 1):
            num_rounds -= self.accepted[depth - 1]
            yield named("coppice_accepted_tokens_per_depth_total", depth=depth), float(num_rounds)


class RequestMetrics:
    """Counts of the requests of this process."""

    def __init__(self) -> None:
        self.inter_token = Tally(TOKEN_BOUNDS_S)
        """Takes the time of each token after the first."""
        self._first_token = Tally(FIRST_TOKEN_BOUNDS_S)
        self._queue = Tally(FIRST_TOKEN_BOUNDS_S)
        self._prefill = Tally(FIRST_TOKEN_BOUNDS_S)
        self._duration = Tally(DURATION_BOUNDS_S)
        self._accept_length = Tally(ACCEPT_BOUNDS)
        self._ends = Counter(dict.fromkeys(_ENDS, 0))  # by code and finish_reason
        self._refusals: Counter[str] = Counter()
        self._rebuilds = Counter(dict.fromkeys(_REBUILDS, 0))  # by role and cause
        self._stalls = Counter({"draft": 0, "reader": 0})
        self._totals = _Totals()
        self._running: set[Tracked] = set()

    def begin(self, request: Tracked) -> None:
        """Count what a request does from now on."""
        self._running.add(request)

    def end(self, request: Tracked) -> None:
        """Keep what a request has counted; it does nothing any more."""
        if request in self._running:
            self._running.remove(request)
            self._totals.add(request)

    def note_end(self, end: RequestEnd) -> None:
        """Count the end of a request."""
        self._ends[end.code, end.finish_reason] += 1
        if end.refused_by:
            self._refusals[end.refused_by] += 1
        timings = end.timings
        if timings is not None:
            self._first_token.add(timings.time_to_first_token_ms / 1e3)
            self._queue.add(timings.queue_ms / 1e3)
            self._prefill.add((timings.time_to_first_token_ms - timings.queue_ms) / 1e3)
            self._duration.add(timings.total_ms / 1e3)
        if end.speculation is not None and end.speculation.num_rounds:
            self._accept_length.add(end.speculation.accept_length)

    def note_rebuild(self, role: str, cause: str, times: int = 1) -> None:
        """Count states of a request that were lost, and are built anew."""
        self._rebuilds[role, cause] += times

    def note_stall(self, cause: str, times: int = 1) -> None:
        """Count waits in vain for a draft, `draft`, or waits for a client, `reader`."""
        self._stalls[cause] += times

    @property
    def samples(self) -> Samples:
        """Return everything by name."""
        totals = self._totals.copy()
        for request in self._running:
            totals.add(request)
        ends = {
            named("coppice_requests_total", code=code, finish_reason=reason): float(count)
            for (code, reason), count in self._ends.items()
        }
        rebuilds = {
            named("coppice_rebuilds_total", worker_role=role, cause=cause): float(count)
            for (role, cause), count in self._rebuilds.items()
        }
        return {
            **ends,
            **rebuilds,
            **dict(counted("coppice_refusals_total", "reason", self._refusals)),
            **dict(counted("coppice_stalls_total", "cause", self._stalls)),
            **dict(histogram("coppice_time_to_first_token_seconds", self._first_token)),
            **dict(histogram("coppice_inter_token_latency_seconds", self.inter_token)),
            **dict(histogram("coppice_request_duration_seconds", self._duration)),
            **dict(histogram("coppice_request_queue_seconds", self._queue)),
            **dict(histogram("coppice_request_prefill_seconds", self._prefill)),
            **dict(histogram("coppice_accept_length", self._accept_length)),
            **totals.samples,
        }


def pool_samples(pool: WorkerPool, *, num_requests: int) -> Samples:
    """Return the named values of the workers, and of who waits for one.

    Args:
        num_requests: Requests admitted, those that wait included.
    """
    samples: Samples = {
        "coppice_requests_running": max(0, num_requests - pool.num_waiting),
        "coppice_requests_waiting": pool.num_waiting,
    }
    for (role, state), count in pool.worker_states.items():
        samples[named("coppice_workers", worker_role=role, state=state)] = count
    for (role, cause), count in pool.num_lost.items():
        samples[named("coppice_workers_lost_total", worker_role=role, cause=cause)] = count
    return samples
