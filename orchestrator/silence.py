"""Which workers are silent, and what comes of it: what operators are told.

Nothing is decided here. A session ends by itself (`workers.py:_watch_silence`), and each request
gives up a worker that leaves it without an answer for too long (`target_handle.py`,
`draft_handle.py`); both take longer than it takes a worker to be listed as silent.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.workers import SILENCE_S, WorkerSession
from shared.config import OrchestratorConfig

SUSPECT_S = 2.0
"""A worker that is well says something, and shows its engine's progress, every 0.5 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """That a worker is silent.

    Args:
        problem: What is missing, and what will be done about it.
        for_s: For how long it has been missing, seconds.
    """

    problem: str
    for_s: float


def silence_of(
    worker: WorkerSession, config: OrchestratorConfig, *, now_s: float
) -> Silence | None:
    """Return whether a worker has said nothing, or has owed requests an answer, for SUSPECT_S.

    An engine that is in one long step looks the same as one that hangs.

    Args:
        now_s: Loop time.
    """
    if worker.silent_s >= SUSPECT_S:
        problem = f"it says nothing; its session ends after {SILENCE_S:g} s"
        return Silence(problem=problem, for_s=worker.silent_s)
    waits_since = worker.waits_since
    if waits_since is None:
        return None
    stalled_s = now_s - max(waits_since, worker.last_progress)
    if stalled_s < SUSPECT_S:
        return None
    return Silence(problem=_stall_of(worker, config), for_s=stalled_s)


def _stall_of(worker: WorkerSession, config: OrchestratorConfig) -> str:
    stalls = "its engine makes no progress while requests wait for it"
    if worker.role == "target":
        return f"{stalls}; they leave it after {config.step_timeout_s:g} s (--step-timeout-s)"
    return (
        f"{stalls}; their rounds have no trees, and they leave it after "
        f"{config.draft_open_timeout_ms / 1e3:g} s (--draft-open-timeout-ms)"
    )
