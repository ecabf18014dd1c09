"""Decide when trees are tried again while all requests rest."""

from __future__ import annotations

# Rounds before a trial; doubled after each trial, up to the last.
_FIRST_PROBE_AFTER = 64
_LAST_PROBE_AFTER = 1024
# A trial ends after so many rounds with trees, or after so many rounds in which trees might come.
_PROBE_ROUNDS = 3
_PROBE_PATIENCE = 64
# Largest share of the time since the last trial that a trial may spend on rows that the draft has
# missed, and the rounds by which a dearer trial is put off. The share is larger after so many
# seconds without a trial, because the rows that a single request has missed grow with the time.
_MOST_REPLAYED, _PUT_OFF_ROUNDS = 0.004, 16
_LONG_UNTRIED_S, _MOST_REPLAYED_THEN = 30.0, 0.01


class Probe:
    """Says when a few requests get trees on trial while all requests rest.

    Attributes:
        num_rounds: Rounds with trees since the last trial began.
    """

    def __init__(self) -> None:
        self.num_rounds = 0
        # By the bit length of the number of requests: rounds before the last trial.
        self._after: dict[int, int] = {}
        self._begins: int | None = None  # round in which the next or current trial begins
        self._paid_at_s: float | None = None  # when a draft last got missed rows for a trial

    def reset(self, num_requests: int) -> None:
        """Note that trees pay with so many requests: waits that trials with as many or fewer
        requests have grown to are forgotten.
        """
        batch = num_requests.bit_length()
        self._after = {more: after for more, after in self._after.items() if more > batch}
        self._begins = None

    def is_on(self, now: int, num_requests: int) -> bool:
        """Return whether a trial is on in round `now`, in which all requests would rest."""
        if self._begins is None:
            batch = num_requests.bit_length()
            after = max(2 * self._after.get(batch, 0), _FIRST_PROBE_AFTER)
            self._after[batch] = min(after, _LAST_PROBE_AFTER)
            self._begins = now + self._after[batch]
        if now < self._begins:
            self.num_rounds = 0
            return False
        if self.num_rounds >= _PROBE_ROUNDS or now >= self._begins + _PROBE_PATIENCE:
            self._begins = None
            return False
        return True

    def affords(self, lost_s: float, now: int, now_s: float) -> bool:
        """Return whether a trial may send a draft the rows it has missed; if not, the trial is put
        off.

        Args:
            lost_s: Time that these rows take.
            now: Number of the round.
            now_s: Monotonic time.
        """
        if self._paid_at_s is None:
            self._paid_at_s = now_s
        since_s = now_s - self._paid_at_s
        share = _MOST_REPLAYED if since_s < _LONG_UNTRIED_S else _MOST_REPLAYED_THEN
        if lost_s > share * since_s:
            self._begins = now + _PUT_OFF_ROUNDS
            return False
        self._paid_at_s = now_s
        return True
