"""When trees are tried again while all requests rest."""

from __future__ import annotations

# Rounds after which a few are tried, twice as many after each try ..
_FIRST_PROBE_AFTER = 64
_LAST_PROBE_AFTER = 1024
# .. for so many rounds, or until the draft has had so many.
_PROBE_ROUNDS = 3
_PROBE_PATIENCE = 64
# .. and the part of the time that may go into rows that drafts have missed; more after so many
# seconds without a try, for what a request alone has missed grows with that time.
_MOST_REPLAYED, _PUT_OFF_ROUNDS = 0.004, 16
_LONG_UNTRIED_S, _MOST_REPLAYED_THEN = 30.0, 0.01


class Probe:
    """When trees are tried while all requests rest.

    Attributes:
        num_rounds: With trees, since the last try began.
    """

    def __init__(self) -> None:
        self.num_rounds = 0
        # Rounds before the last try with so many requests, by powers of two.
        self._after: dict[int, int] = {}
        self._begins: int | None = None  # the next try, or the one that is on
        self._paid_at_s: float | None = None  # when a draft got what it had missed for one

    def reset(self, num_requests: int) -> None:
        """Take note that trees pay with so many requests: tries with more of them said nothing of
        it.
        """
        batch = num_requests.bit_length()
        self._after = {more: after for more, after in self._after.items() if more > batch}
        self._begins = None

    def is_on(self, now: int, num_requests: int) -> bool:
        """Return whether some requests are to be tried in this round, while all would rest."""
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
        """Return whether a draft may get what it has missed for a try; else that is put off.

        Args:
            lost_s: What it takes.
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
