"""When and where a draft that was lost is opened again."""

from __future__ import annotations

from tenacity import RetryCallState, wait_exponential_jitter
from tenacity.wait import wait_base

_NO_WORKER_WAIT_S = 0.5
_REOPEN_WAIT = wait_exponential_jitter(multiplier=0.05, max=5.0, jitter=0.05)
_MAX_DOUBLINGS = 8


class DraftRetry:
    """Backs off as long as drafts are lost without having sent a tree."""

    def __init__(self) -> None:
        self.avoid: frozenset[str] = frozenset()
        """Address of the worker that lost the draft, used only if there is no other one."""
        self._num_losses = 0
        self._next_at = 0.0  # loop time
        self._loss = ""

    def is_due(self, now: float) -> bool:
        """Return whether to open a draft now (loop time, seconds)."""
        return now >= self._next_at

    @property
    def silence_factor(self) -> int:
        """Return how many times as long as a first draft the next one may be silent."""
        return int(2 ** min(self._num_losses, _MAX_DOUBLINGS))

    def note_tree(self) -> None:
        """Take note that the draft works."""
        self._num_losses = 0

    def note_no_worker(self, now: float) -> None:
        """Take note that there is no worker that could draft."""
        self._next_at = now + _NO_WORKER_WAIT_S

    def take_loss(self) -> str:
        """Return why the draft was lost, once; "" if it was not."""
        loss, self._loss = self._loss, ""
        return loss

    def note_loss(self, address: str | None, now: float, reason: str) -> None:
        """Take note that a draft was lost.

        Args:
            address: Of a worker that runs on; None: the worker is gone.
            reason: Why, in words; "": that is no news.
        """
        self._loss = reason
        if address is not None:
            self.avoid = frozenset({address})
        self._num_losses += 1
        self._next_at = now + wait_s(_REOPEN_WAIT, self._num_losses)


def wait_s(wait: wait_base, num_failures: int) -> float:
    """Return how long to wait after so many failures in a row, seconds."""
    attempt = RetryCallState(None, None, (), {})  # type: ignore[arg-type]
    attempt.attempt_number = num_failures
    return wait(attempt)
