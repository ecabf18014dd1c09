"""When a client sends a request again, and how long it waits before that."""

from __future__ import annotations

import random
import time
from typing import Any

from tenacity import RetryCallState

from shared.errors import ResourceExhaustedError, UnavailableError

_MAX_REFUSALS = 20
_FIRST_WAIT_S, _MOST_WAIT_S, _JITTER_S = 0.1, 2.0, 0.1
# UNAVAILABLE for good: the server is there and has said why.
_FINAL_REASONS = frozenset({"NO_DRAFT", "NO_PROGRESS"})
# Clients of several servers that were told the same come one after the other.
_REFUSED_JITTER_S = 0.05


class Retries:
    """Decides about one request.

    UNAVAILABLE: again soon, a few times in a row without a token. RESOURCE_EXHAUSTED with a
    delay: again after that, as long as the deadline leaves time for it.

    Args:
        max_retries: How often in a row, without a token in between; 0: nothing is sent again.
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
        self.num_refusals = num_refusals
        """How often the server had no room."""

    @property
    def policy(self) -> dict[str, Any]:
        """Return the options of tenacity."""
        return {"retry": self._goes_on, "wait": self._wait_s, "reraise": True}

    def note_progress(self) -> None:
        """Take note that tokens came."""
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
            self._num_fruitless += 1
            return self._num_fruitless <= self._max_retries
        return False

    def _has_time(self, wait_s: float) -> bool:
        return self._deadline is None or time.monotonic() + wait_s < self._deadline

    def _wait_s(self, state: RetryCallState) -> float:
        assert state.outcome is not None
        error = state.outcome.exception()
        if isinstance(error, ResourceExhaustedError):
            return error.retry_after_s + random.uniform(0, _REFUSED_JITTER_S)
        wait_s = min(_FIRST_WAIT_S * 2.0 ** (self._num_fruitless - 1), _MOST_WAIT_S)
        return wait_s + random.uniform(0, _JITTER_S)
