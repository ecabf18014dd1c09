"""Try trees again while all requests rest: a few get trees on trial, less and less often."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from target_service.budgets.acceptance import Acceptance
from target_service.budgets.costs import RoundCosts
from target_service.budgets.missed import replayed

Ints = NDArray[np.int64]

# Of a trial: highest rung, and most requests.
_RUNG, _MOST_REQUESTS = 3, 4
# Rounds before a trial; doubled after each trial, up to the last, but a quarter of what they were
# after a trial by which texts are easier than expected, by so many classes of ease.
_FIRST_WAIT, _LAST_WAIT = 64, 1024
_SOONER, _MUCH_EASIER = 4, 2
# A trial ends after so many rounds with trees, or after so many rounds in which trees might come.
_ROUNDS, _PATIENCE = 3, 64
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
    """Deals trees on trial while all requests rest.

    Args:
        costs: Expected times of rows and steps.
        acceptance: How easy requests are, and new ones are expected to be.
        clock: Returns when the last step ended, monotonic, seconds.
    """

    def __init__(
        self, costs: RoundCosts, acceptance: Acceptance, clock: Callable[[], float]
    ) -> None:
        self._costs, self._acceptance, self._clock = costs, acceptance, clock
        is_gpu = costs.is_padded
        self._most_replayed = _MOST_REPLAYED if is_gpu else _MOST_REPLAYED_CPU
        self._have_paid = 1 if is_gpu else _HAVE_PAID_CPU
        self._num_paid = 0  # decisions in a row by which trees pay
        # By the bit length of the number of requests: the rounds that the last trial was followed
        # by, and the round in which the next one may begin.
        self._waits: dict[int, int] = {}
        self._due: dict[int, int] = {}
        # Of the trial that goes on: the round in which it began (None: there is none), the bit
        # length of the number of requests, and the class of new requests then.
        self._begun: int | None = None
        self._size, self._class_before = 0, 0
        self._num_rounds = 0  # with trees, since the last trial began
        self._paid_at_s: float | None = None  # when a draft last got missed rows for a trial

    def note_trees(self, num_requests: int) -> None:
        """Note that trees pay with so many requests. Once they have for a while, waits that trials
        with as many or fewer requests have grown to are forgotten.
        """
        self._num_paid += 1
        if self._begun is not None:
            self._end(self._begun)
        if self._num_paid >= self._have_paid:
            for rounds in (self._waits, self._due):
                for size in [size for size in rounds if size <= num_requests.bit_length()]:
                    del rounds[size]

    def note_rest(self) -> None:
        """Note that trees do not pay."""
        self._num_paid = 0

    def note_round(self) -> None:
        """Note that a round had trees."""
        self._num_rounds += 1

    def has_failed(self, num_requests: int) -> bool:
        """Return whether trees did not pay in a trial with about so many requests (`_near`) or
        with fewer, and have not paid since.
        """
        most = num_requests.bit_length() + 1
        return any(size <= most and wait > _FIRST_WAIT for size, wait in self._waits.items())

    def rungs(
        self, now: int, slots: Ints, had: Ints, caps: Ints, missed: Ints | None, *, num_rows: int
    ) -> Ints:
        """Return the rungs while no request would get a tree, [B]: 0, but for a few in a trial.

        Those are on trial whose drafts have missed the fewest rows, if these take little of the
        time since the last trial: `_most_on_trial` requests at most, and only one if its rows have
        to be computed again.

        Args:
            now: Number of the round.
            slots: [B].
            had: [B], the rung that each request has.
            caps: [B], the highest rung that each request may have.
            missed: [B, 2], as of `replayed`; None: no rows.
            num_rows: Of a step without trees.
        """
        rungs = np.zeros_like(caps)
        may_have = (caps > 0).nonzero()[0]
        if not self._is_on(now, len(slots).bit_length()) or not len(may_have):
            return rungs
        rung = min(_RUNG, int(caps.max()))
        chosen = may_have[had.take(may_have) > 0]  # the trial that goes on
        if not len(chosen):
            chosen = self._chosen(now, slots, may_have, missed, self._most_on_trial(num_rows, rung))
        rungs[chosen] = np.minimum(caps[chosen], rung)
        return rungs

    def _is_on(self, now: int, size: int) -> bool:
        """Return whether a trial goes on, or may begin.

        Args:
            size: Bit length of the number of requests.
        """
        if self._begun is None:
            due = _near(self._due, size)
            if not due:
                self._due[size] = now + _FIRST_WAIT
            return bool(due) and now >= max(due)
        if self._num_rounds < _ROUNDS and now < self._begun + _PATIENCE:
            return True
        self._end(now)
        return False

    def _chosen(
        self, now: int, slots: Ints, may_have: Ints, missed: Ints | None, most: int
    ) -> Ints:
        """Begin a trial with these requests, or put it off if their rows take too long.

        Args:
            may_have: Indices of the requests that may have trees.
            most: Number of requests.
        Returns: Indices of requests; none: it was put off.
        """
        size = len(slots).bit_length()
        lost = np.zeros_like(slots) if missed is None else replayed(missed)
        order = np.lexsort((-self._acceptance.promise(slots), lost))
        order = order[np.isin(order, may_have)]
        if missed is not None and missed[order[0], 1]:
            most = 1
        chosen: Ints = order[:most]
        lost_s = self._costs.marginal_s(lost.take(chosen).cumsum().astype(np.float64))
        now_s = self._clock()
        chosen = chosen[lost_s <= self._allowance_s(now_s)]
        if not len(chosen):
            self._due[size] = now + _PUT_OFF_ROUNDS
            return chosen
        if lost_s[len(chosen) - 1]:
            self._paid_at_s = now_s
        if not self._costs.is_padded:
            self._costs.forget_implausible(len(chosen))
        self._begun, self._size, self._num_rounds = now, size, 0
        self._class_before = self._acceptance.mean_class
        return chosen

    def _allowance_s(self, now_s: float) -> float:
        """Return how long the rows may take that a trial sends to drafts."""
        if self._paid_at_s is None:
            self._paid_at_s = now_s
        since_s, share = now_s - self._paid_at_s, self._most_replayed
        if since_s >= _LONG_UNTRIED_S:
            share = max(share, _MOST_REPLAYED_THEN)
        return share * since_s

    def _most_on_trial(self, num_rows: int, rung: int) -> int:
        """Return how many trees of a rung fit beside other rows into the next captured size of a
        step, at least one and at most `_MOST_REQUESTS`; on a CPU, where steps have no sizes, so
        many.
        """
        costs = self._costs
        if not costs.is_padded:
            return _MOST_REQUESTS
        sizes = costs.sizes_above(num_rows)
        num_more = max(int(costs.rows[rung]) - 1, 1)
        room = (int(sizes[0]) - num_rows) // num_more if len(sizes) else 0
        return min(max(room, 1), _MOST_REQUESTS)

    def _end(self, now: int) -> None:
        """End the trial that goes on; the next one with about as many requests has to wait."""
        wait = max(_near(self._waits, self._size), default=_FIRST_WAIT)
        is_easier = self._acceptance.mean_class >= self._class_before + _MUCH_EASIER
        wait = max(wait // _SOONER, _FIRST_WAIT) if is_easier else min(2 * wait, _LAST_WAIT)
        for near in (self._size - 1, self._size + 1):  # this trial says more
            self._waits.pop(near, None)
            self._due.pop(near, None)
        self._waits[self._size], self._due[self._size] = wait, now + wait
        self._begun = None


def _near(rounds: Mapping[int, int], size: int) -> list[int]:
    """Return what is known of about as many requests: of the size, and of those beside it.

    Args:
        rounds: By the bit length of the number of requests.
        size: Such a bit length.
    """
    return [rounds[near] for near in (size - 1, size, size + 1) if near in rounds]
