"""When those who are refused should come again, so that few come in vain and no place stays empty.

    rate   places / mean time that a place is held, from requests that ended and those that run
    turn   each refusal takes the next turn of a queue that moves a little faster than places do

Nobody is held in that queue: it is a list of times. A client that comes at its turn finds a place
most of the time, for those who come for the first time leave free what is for turns that are near:
for as many of them as are taken, of late. A turn that nobody takes is soon forgotten.
"""

from __future__ import annotations

import random
from bisect import bisect_right, insort

_LEAST_S, _MOST_S = 0.1, 300.0
# Turns per place that is expected to come free: some do not come, and an empty place is a loss.
_TURNS_PER_PLACE = 1.2
# A client is told to come so many places later than its turn, at most. So long after that its place
# is kept, and its turn is known.
_JITTER_PLACES = 4
_KEPT_LATE_S, _GRACE_S = 0.25, 1.0
_MAX_TURNS = 65536
# Before, a place is kept so long for it: of the time that places are held.
_KEPT_EARLY = 0.05
# Means are those of so many requests, or turns.
_NUM_AVERAGED = 32


class VirtualQueue:
    """Says each refused client when its turn is; times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._turns: list[float] = []  # ascending
        self._next_turn_s = 0.0
        self._mean_held_s = 1.0
        self._num_ended = 0
        self._share_taken = 0.0  # of the turns

    def note_end(self, held_s: float) -> None:
        """Take note that a place is free again.

        Args:
            held_s: How long a request had it.
        """
        self._num_ended += 1
        weight = 1 / min(self._num_ended, _NUM_AVERAGED)
        self._mean_held_s += weight * (held_s - self._mean_held_s)

    def take_turn(self, now_s: float) -> None:
        """Take note that somebody has come whose turn it is."""
        self._forget_late(now_s)
        if self._turns:
            del self._turns[0]
            self._note_turn(is_taken=True)

    def num_reserved(self, now_s: float) -> int:
        """Return how many free places are for others than those who come for the first time."""
        self._forget_late(now_s)
        since = bisect_right(self._turns, now_s - _KEPT_LATE_S)
        until = bisect_right(self._turns, now_s + _KEPT_EARLY * self._mean_held_s)
        return round((until - since) * self._share_taken)

    def refuse(self, now_s: float, *, num_places: int, mean_age_s: float) -> float:
        """Return after how long the client that is refused now should come again.

        Args:
            num_places: That are taken, all of them.
            mean_age_s: Of the requests that have them: they take longer than that.
        """
        place_s = max(self._mean_held_s, mean_age_s, 1e-3) / num_places
        next_turn_s = max(self._next_turn_s, now_s) + place_s / _TURNS_PER_PLACE
        self._next_turn_s = min(next_turn_s, now_s + _MOST_S)
        wait_s = max(self._next_turn_s - now_s, _LEAST_S)
        wait_s += random.uniform(0, _JITTER_PLACES * place_s)
        if next_turn_s > self._next_turn_s:  # they cannot be told apart: let them come spread
            wait_s *= random.uniform(0.5, 1.0)
        if len(self._turns) < _MAX_TURNS:
            insort(self._turns, now_s + wait_s)
        return wait_s

    def _forget_late(self, now_s: float) -> None:
        num_late = bisect_right(self._turns, now_s - _GRACE_S)
        for _ in range(num_late):
            self._note_turn(is_taken=False)
        del self._turns[:num_late]

    def _note_turn(self, *, is_taken: bool) -> None:
        self._share_taken += (is_taken - self._share_taken) / _NUM_AVERAGED
