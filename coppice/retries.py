"""When a client sends a request again, and how long it waits before that."""

from __future__ import annotations

import random
import time
from typing import Any

from tenacity import RetryCallState

from shared.errors import ResourceExhaustedError, UnavailableError

RESUME_BUDGET_S = 30.0
"""How long a request that was being served is sent again without progress, from the break on.

A killed orchestrator's successor serves after 4 to 5 s, on a loaded machine later.
"""
_MAX_REFUSALS = 20
_FIRST_WAIT_S, _MOST_WAIT_S, _JITTER_S = 0.1, 2.0, 0.1
# UNAVAILABLE for good: the server is there and has said why.
_FINAL_REASONS = frozenset({"NO_DRAFT", "NO_PROGRESS"})
# Clients of several servers that were told the same come one after the other.
_REFUSED_JITTER_S = 0.05


class Retries:
    """Decides about one request.

    UNAVAILABLE: again soon, a few times in a row without progress, and for RESUME_BUDGET_S if it
    was being served. RESOURCE_EXHAUSTED with a delay: again after that, as long as the deadline
    leaves time for it.

    Args:
        max_retries: How often in a row, without progress in between; 0: nothing is sent again.
        deadline: Of the request, by the monotonic clock; None: it has none.
        waits_for_room: Come again after a refusal; else who asks does that.
        num_refusals: How often it was refused before.
    """

    def __init__(
        self,
        max_retries: int,
        deadline: float | None,
        *,
        waits_for_room: bool = True,
        num_refusals: int = 0,
    ) -> None:
        self._max_retries = max_retries
        self._waits_for_room = waits_for_room and max_retries > 0
        self._deadline = deadline
        self._num_fruitless = 0
        self._is_served = False
        self._broken_at = 0.0
        self.num_refusals = num_refusals
        """How often the server had no room."""

    @property
    def policy(self) -> dict[str, Any]:
        """Return the options of tenacity."""
        return {"retry": self._goes_on, "wait": self._wait_s, "reraise": True}

    def note_progress(self) -> None:
        """Take note that the request is being served: it was admitted, or tokens came."""
        self._is_served = True
        self._num_fruitless = self.num_refusals = 0

    def _goes_on(self, state: RetryCallState) -> bool:
        assert state.outcome is not None
        error = state.outcome.exception()
        if isinstance(error, ResourceExhaustedError) and error.retry_after_s:
            if not self._waits_for_room:
                return False
            self.num_refusals += 1
            return self.num_refusals <= _MAX_REFUSALS and self._has_time(error.retry_after_s)
        if isinstance(error, UnavailableError) and error.reason not in _FINAL_REASONS:
            if not self._num_fruitless:
                self._broken_at = time.monotonic()
            self._num_fruitless += 1
            return self._num_fruitless <= self._max_retries or self._has_budget()
        return False

    def _has_budget(self) -> bool:
        is_resumed = self._is_served and self._max_retries > 0
        return is_resumed and time.monotonic() < self._broken_at + RESUME_BUDGET_S

    def _has_time(self, wait_s: float) -> bool:
        return self._deadline is None or time.monotonic() + wait_s < self._deadline

    def _wait_s(self, state: RetryCallState) -> float:
        assert state.outcome is not None
        error = state.outcome.exception()
        if isinstance(error, ResourceExhaustedError):
            return error.retry_after_s + random.uniform(0, _REFUSED_JITTER_S)
        wait_s = min(_FIRST_WAIT_S * 2.0 ** (self._num_fruitless - 1), _MOST_WAIT_S)
        wait_s += random.uniform(0, _JITTER_S)
        if self._deadline is not None:  # the next attempt says that it has passed
            wait_s = min(wait_s, max(0.0, self._deadline - time.monotonic()))
        return wait_s
