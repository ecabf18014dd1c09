"""Decide when trees are tried again while all requests rest."""

from __future__ import annotations

# Rounds before a trial; doubled after each trial, up to the last, but a quarter of what they were
# after a trial by which texts are easier than expected, by so many classes of ease.
_FIRST_PROBE_AFTER = 64
_LAST_PROBE_AFTER = 1024
_SOONER, _MUCH_EASIER = 4, 2
# A trial ends after so many rounds with trees, or after so many rounds in which trees might come.
_PROBE_ROUNDS = 3
_PROBE_PATIENCE = 64
# Largest share of the time since the last trial that a trial may spend on rows that the draft has
# missed, and the rounds by which a dearer trial is put off. The share is larger after so many
# seconds without a trial, because the rows that a single request has missed grow with the time.
# On a CPU, where rounds are as slow as few of these rows, it is larger from the beginning.
_MOST_REPLAYED, _PUT_OFF_ROUNDS = 0.004, 16
_LONG_UNTRIED_S, _MOST_REPLAYED_THEN = 30.0, 0.01
_MOST_REPLAYED_CPU = 0.02
# Decisions in a row by which trees must have paid on a CPU, where few rounds may be fast by chance,
# before the wait for the next trial is short again.
_HAVE_PAID_CPU = 4


class Probe:
    """Says when a few requests get trees on trial while all requests rest.

    Args:
        is_gpu: The target's device is no CPU.

    Attributes:
        num_rounds: Rounds with trees since the last trial began.
    """

    def __init__(self, *, is_gpu: bool) -> None:
        self.num_rounds = 0
        self._most_replayed = _MOST_REPLAYED if is_gpu else _MOST_REPLAYED_CPU
        self._have_paid = 1 if is_gpu else _HAVE_PAID_CPU
        self._num_paid = 0  # decisions in a row by which trees pay
        # By the bit length of the number of requests: rounds before the last trial.
        self._after: dict[int, int] = {}
        self._begins: int | None = None  # round in which the next or current trial begins
        self._has_begun = False
        self._class_before = 0
        self._paid_at_s: float | None = None  # when a draft last got missed rows for a trial

    def note_trees(self, num_requests: int) -> None:
        """Note that trees pay with so many requests. Once they have for a while, waits that trials
        with as many or fewer requests have grown to are forgotten.
        """
        self._num_paid += 1
        self._end()
        if self._num_paid >= self._have_paid:
            batch = num_requests.bit_length()
            self._after = {more: after for more, after in self._after.items() if more > batch}

    def note_rest(self) -> None:
        """Note that trees do not pay."""
        self._num_paid = 0

    def has_failed(self, num_requests: int) -> bool:
        """Return whether trees did not pay in a trial with about so many requests, or with fewer,
        and have not paid since.
        """
        batch = num_requests.bit_length()
        return any(
            after > _FIRST_PROBE_AFTER for size, after in self._after.items() if size <= batch
        )

    def is_on(self, now: int, num_requests: int, mean_class: int) -> bool:
        """Return whether a trial is on in round `now`, in which all requests would rest.

        Args:
            mean_class: How easy new requests are expected to be.
        """
        batch = num_requests.bit_length()
        if self._begins is None:
            after = max(2 * self._after.get(batch, 0), _FIRST_PROBE_AFTER)
            self._after[batch] = min(after, _LAST_PROBE_AFTER)
            self._begins = now + self._after[batch]
        if now < self._begins:
            return False
        is_over = self.num_rounds >= _PROBE_ROUNDS or now >= self._begins + _PROBE_PATIENCE
        if self._has_begun and is_over:
            self._end()
            if mean_class >= self._class_before + _MUCH_EASIER and batch in self._after:
                self._after[batch] //= 2 * _SOONER  # doubled before the next one
            return False
        return True

    def begin(self, now: int, mean_class: int) -> None:
        """Note that some requests get trees on trial from this round on."""
        self._begins, self._has_begun, self.num_rounds = now, True, 0
        self._class_before = mean_class

    def _end(self) -> None:
        self._begins, self._has_begun = None, False

    def allowance_s(self, now_s: float) -> float:
        """Return how long the rows may take that a trial sends to drafts.

        Args:
            now_s: Monotonic time.
        """
        if self._paid_at_s is None:
            self._paid_at_s = now_s
        since_s, share = now_s - self._paid_at_s, self._most_replayed
        if since_s >= _LONG_UNTRIED_S:
            share = max(share, _MOST_REPLAYED_THEN)
        return share * since_s

    def note_paid(self, now_s: float) -> None:
        """Note that a trial has sent such rows."""
        self._paid_at_s = now_s

    def put_off(self, now: int) -> None:
        """Begin the trial some rounds later."""
        self._begins, self._has_begun = now + _PUT_OFF_ROUNDS, False
