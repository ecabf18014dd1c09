"""When and where a draft that was lost is opened again."""

from __future__ import annotations

from tenacity import RetryCallState, wait_exponential_jitter
from tenacity.wait import wait_base

from orchestrator.pool import WorkerPool
from orchestrator.workers import WorkerSession

_NO_WORKER_WAIT_S = 0.5
_REOPEN_WAIT = wait_exponential_jitter(multiplier=0.05, max=5.0, jitter=0.05)
_MAX_DOUBLINGS = 8


class DraftRetry:
    """Backs off as long as drafts are lost without having sent a tree.

    Args:
        max_silence_s: A first draft may leave its orders without an answer for so long.
    """

    def __init__(self, pool: WorkerPool, *, max_silence_s: float) -> None:
        self._pool = pool
        self._max_silence_s = max_silence_s
        self._avoid: frozenset[str] = frozenset()  # who lost it last: only if there is no other
        self._num_losses = 0
        self._next_at = 0.0  # loop time
        self._loss = ""

    def is_due(self, now: float) -> bool:
        """Return whether to open a draft now (loop time, seconds)."""
        return now >= self._next_at

    @property
    def max_silence_s(self) -> float:
        """Return how long a draft may leave its orders without an answer now, seconds."""
        return self._max_silence_s * float(2 ** min(self._num_losses, _MAX_DOUBLINGS))

    def pick(self, target: WorkerSession, now: float) -> WorkerSession | None:
        """Return the worker to open a draft on; without one, it is due again after a while."""
        worker = self._pool.pick_draft(target, self._avoid)
        if worker is None:
            self._next_at = now + _NO_WORKER_WAIT_S
        return worker

    def note_tree(self) -> None:
        """Take note that the draft works."""
        self._num_losses = 0

    def take_loss(self) -> str:
        """Return why the draft was lost, once; "" if it was not."""
        loss, self._loss = self._loss, ""
        return loss

    def note_loss(self, worker: WorkerSession | None, now: float, reason: str) -> None:
        """Take note that a draft was lost.

        Args:
            worker: Where it was, if that runs on; None: the worker is gone.
            reason: Why, in words; "": that is no news.
        """
        self._loss = reason
        if worker is not None:
            self._avoid = frozenset({worker.address})
        self._num_losses += 1
        self._next_at = now + wait_s(_REOPEN_WAIT, self._num_losses)


def wait_s(wait: wait_base, num_failures: int) -> float:
    """Return how long to wait after so many failures in a row, seconds."""
    attempt = RetryCallState(None, None, (), {})  # type: ignore[arg-type]
    attempt.attempt_number = num_failures
    return wait(attempt)
