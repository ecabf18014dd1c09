"""How long an engine may be silent before it counts as hung; it follows from its own step times."""

from __future__ import annotations

FLOOR_S = 5.0
STEP_FACTOR = 20.0
# Step times count for one to two windows.
WINDOW_S = 30.0


class EngineWatch:
    """The silence of one engine, and how much of it is usual. Times are monotonic seconds.

    Args:
        limit_s: Longest silence in any case, also while a graph is captured.
        interval_s: Between two calls of `look`.
        now: Time of the start; the engine owes nothing yet.
    """

    def __init__(self, *, limit_s: float, interval_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._interval_s = interval_s
        self._silent_since = self._looked_at = self._window_since = now
        self._longest_s = self._longest_before_s = 0.0
        self._owes_report = self._is_slow = False

    @property
    def owes_report(self) -> bool:
        """Return whether the engine must say something by the deadline."""
        return self._owes_report

    @property
    def deadline_s(self) -> float:
        """Return how long the engine may be silent now."""
        if self._is_slow:
            return self._limit_s
        longest_s = max(self._longest_s, self._longest_before_s)
        return min(self._limit_s, max(FLOOR_S, STEP_FACTOR * longest_s))

    def silence_s(self, now: float) -> float:
        """Return for how long the engine has owed a report; 0 if it owes none."""
        return max(0.0, now - self._silent_since) if self._owes_report else 0.0

    def note_debt(self, now: float) -> None:
        """Note that the engine owes a report, from now on if it did not already."""
        if not self._owes_report:
            self._silent_since, self._owes_report = now, True

    def note_report(self, now: float, *, owes_more: bool, is_slow: bool = False) -> None:
        """Note that the engine has said something.

        Args:
            owes_more: It goes on by itself, or has not taken all messages.
            is_slow: What it does next may take far longer than its steps.
        """
        self._forgive(now)
        if now - self._window_since > WINDOW_S:
            self._longest_before_s, self._longest_s = self._longest_s, 0.0
            self._window_since = now
        if self._owes_report and not self._is_slow:
            self._longest_s = max(self._longest_s, now - self._silent_since)
        self._silent_since = now
        self._owes_report, self._is_slow = owes_more, is_slow

    def look(self, now: float) -> float:
        """Return for how long the engine has owed a report; 0 while that is not too long.

        Time in which this process did not run either, because all of them were stopped, is not
        counted.
        """
        self._forgive(now)
        self._looked_at = now
        silent_s = now - self._silent_since
        return silent_s if self._owes_report and silent_s > self.deadline_s else 0.0

    def _forgive(self, now: float) -> None:
        late_s = now - self._looked_at - self._interval_s
        if late_s > self._interval_s:
            self._silent_since = min(now, self._silent_since + late_s)
            self._looked_at = now
