"""Decide every few rounds which rung of the ladder each request of a target gets.

One decision is a `Deal`: `Dealer` computes it from what is known of requests (`Acceptance`) and of
rounds (`RoundCosts`). This module adds what lasts from one decision to the next: a decision holds
for a few rounds; requests keep their rungs unless another deal brings clearly more tokens per
second; a request that rests does so for a few rounds at least; and while all requests rest, a few
of them are tried with trees again, less and less often.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.messages import TreeShape
from target_service.budgets.acceptance import LAST_HOPELESS_CLASS, Acceptance
from target_service.budgets.costs import RoundCosts, bucket_size
from target_service.budgets.deal import NOTHING_FIXED, Deal, Dealer, FixedRounds, Options
from target_service.budgets.missed import has_many, pays_back
from target_service.budgets.probe import Probe
from target_service.budgets.prompt_rounds import PromptRounds
from target_service.budgets.round_timer import RoundTimer, StepTimes

Ints = NDArray[np.int64]

DECISION_ROUNDS = 4
"""Rounds that a decision holds for, while the same requests run."""

# Hysteresis: the share of tokens per second that a change must add. Larger on a CPU, where times of
# rounds scatter because other processes use the cores as well.
_FAVOUR, _FAVOUR_CPU = 0.02, 0.05
# The share that trees must add over no trees at all, or drafts do not read new prompts and, on a
# GPU, all rest; and where there are trees already. Beside what a round without prompts takes,
# drafts have prompts to read, and requests with trees end one by one, those without them together.
_LEAST_GAIN, _LEAST_KEPT_GAIN = 0.05, 0.03
# Most running requests that may have trees on a CPU. With more, trees of 6/2/8 had 0.78 to 1.17 of
# plain decoding's tokens per second, by the machine, and finding out which cost up to a fifth.
_MOST_REQUESTS_CPU = 2
# One decision in so many has no hysteresis: what a single request loses by keeping a bad rung is
# below the threshold, which is a share of the tokens of all requests.
_UNFAVOURED_DECISION = 16
# A round that takes this many times its expected time causes a new decision at once.
_BAD_SURPRISE = 1.3
# Least rounds of a rest: each rest ends with a draft that reads the rows it has missed.
_LEAST_REST = 4
# Rounds of a trial without trees; the first of them says nothing.
_PLAIN_TRY_ROUNDS = 6
# Time of trees while many prompts are read, over the time of trees without prompts, if the draft
# reads these prompts on the target's GPU. With prompts of 128 requests the steps of an H200 took
# half as long again as rows and draft explain. With a GPU for each they do not: 128 requests had
# 1.05 of the tokens per second that they have without trees beside their prompts.
_BESIDE_LONG_READING_SHARED = 1.5
# Decisions for which a forecast (`TreeBudget._forecast`) is kept.
_FORECAST_DECISIONS = 16
# So many requests keep no rows once a trial has shown that trees do not pay: on an H200 a step of
# 128 took 4% longer with its rows, of 256 up to 7%.
_MANY_REQUESTS = 128
# The table of gains changes slowly: decisions between two updates of it, at first and later.
_FIRST_GAINS, _LAST_GAINS = 2, 128


class _Now(NamedTuple):
    """What a decision is about.

    Args:
        slots: [B], all different.
        fixed: Other requests of the same steps.
        num_coming: As of `TreeBudget.decide`.
        had: [B], the rung that each request has.
        is_new: [B], whether nothing was decided about it yet.
        classes: [B], as of Acceptance.
        held: [B], the rung that each request keeps if nothing better is found.
        favour: The share of tokens per second that another deal must add (hysteresis).
    """

    slots: Ints
    fixed: FixedRounds
    num_coming: int
    had: Ints
    is_new: NDArray[np.bool_]
    classes: Ints
    held: Ints
    favour: float

    @property
    def num_requests(self) -> int:
        """Return how many requests run."""
        return len(self.slots) + self.fixed.num_requests


class TreeBudget:
    """Decides about the trees of all requests whose trees the target may choose.

    Args:
        costs: Expected times of rounds; learns from rounds.
        ladder: Shapes of rungs 1, 2, ...; rung 0 is the root alone.
        num_slots: Most requests at once. A request's slot is its row of the page table.
        clock: Returns when the last step ended, monotonic, seconds.
        gpu_is_shared: The draft may have the target's GPU.
    """

    def __init__(
        self,
        costs: RoundCosts,
        ladder: Sequence[TreeShape],
        num_slots: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        gpu_is_shared: bool = False,
    ) -> None:
        self.costs = costs
        self.acceptance = Acceptance(ladder, num_slots)
        self.rungs: Ints = np.zeros(num_slots, dtype=np.int64)
        """[num_slots], the rung of each slot as of the last decision; 0: the root alone."""
        self.needs_no_rows = np.zeros(num_slots, dtype=bool)
        """[num_slots], whether feature rows of this slot's request are not worth keeping: all
        requests rest, and its trees would not pay even if it ran alone, or all rest for long
        (`_rests_for_long`).
        """
        self._clock = clock
        self._beside_long_reading = _BESIDE_LONG_READING_SHARED if gpu_is_shared else 1.0
        self._rung_of_size = _rung_of_size(costs.rows)
        self._is_tree = np.isin(np.arange(len(self._rung_of_size)), costs.rows[1:])
        self._dealer = Dealer(self.acceptance.gains(), costs)
        self._num_decisions = 0
        self._new_gains_at = _FIRST_GAINS
        self._limit = 0
        self._most_have = 0
        self._round = 0
        self._decided_round = -DECISION_ROUNDS
        self._is_new = np.ones(num_slots, dtype=bool)  # nothing was decided yet
        self._rests_until = np.zeros(num_slots, dtype=np.int64)
        self._last_rest_ends = 0  # in which round the last of these rests ends
        self._probe = Probe(costs, self.acceptance, clock)
        self._prompts = PromptRounds(costs)
        self._rounds = RoundTimer(num_slots, clock)
        # By number of requests: in which period of decisions the deal was computed, and the deal.
        self._forecasts: dict[int, tuple[int, Deal]] = {}

    def begin(self, slot: int) -> None:
        """Forget the former request of a slot: a new request holds the slot now."""
        self.acceptance.begin(slot)
        self._rounds.begin(slot)
        self._rests_until[slot] = 0
        self._is_new[slot] = True
        self.needs_no_rows[slot] = False
        self.rungs[slot] = 0
        self._decided_round = -DECISION_ROUNDS

    def would_rest(self, num_requests: int) -> bool:
        """Return whether all of `num_requests` requests of mean ease would rest."""
        if self._are_too_many(num_requests):
            return True
        if not self._num_decisions or num_requests <= 1:
            return self.expects_nothing
        return not self._forecast(num_requests).limit

    def _are_too_many(self, num_requests: int) -> bool:
        """Return whether so many requests have no trees, whatever trees promise."""
        return not self.costs.is_padded and num_requests > _MOST_REQUESTS_CPU

    def _forecast(self, num_requests: int) -> Deal:
        """Return the deal for `num_requests` requests of mean ease."""
        count, era = bucket_size(num_requests), self._num_decisions // _FORECAST_DECISIONS
        known = self._forecasts.get(count)
        if known is None or known[0] != era:
            classes = np.full(num_requests, self.acceptance.mean_class)
            caps = np.full(num_requests, len(self.costs.rows) - 1)
            favour = max(self._favour, _LEAST_GAIN)
            deal = self._dealer.deal(classes, caps, np.zeros_like(caps), favour=favour)
            known = self._forecasts[count] = era, deal
        return known[1]

    @property
    def expects_nothing(self) -> bool:
        """Return whether the trees of a new request would not pay even if it ran alone."""
        return self._num_decisions > 0 and self.acceptance.mean_class <= LAST_HOPELESS_CLASS

    def newcomer_needs_no_rows(self, num_requests: int) -> bool:
        """Return whether rows of a new request, which would rest beside the others, are not worth
        keeping.

        Args:
            num_requests: With the new one.
        """
        is_long = self._rests_for_long(num_requests) and self.would_rest(num_requests)
        return self.expects_nothing or is_long

    def _rests_for_long(self, num_requests: int) -> bool:
        """Return whether so many requests are likely to rest until they end: they are many, and
        trees did not pay in a trial with as many or fewer.
        """
        return num_requests >= _MANY_REQUESTS and self._probe.has_failed(num_requests)

    def join(self, slot: int, cap: int) -> None:
        """Give a new request the most frequent rung of the last decision, until the next decision.

        Args:
            cap: Highest rung that the request may have.
        """
        self.rungs[slot] = min(self._most_have, cap)

    @property
    def is_due(self) -> bool:
        """Return whether the last decision has held for long enough."""
        return self._round >= self._decided_round + DECISION_ROUNDS

    def decide(
        self,
        slots: Ints,
        caps: Ints,
        fixed: FixedRounds = NOTHING_FIXED,
        *,
        missed: Ints | None = None,
        num_left: Ints | None = None,
        num_coming: int = 0,
        num_prompt_rows: int = 0,
    ) -> None:
        """Decide which rung each request gets.

        Args:
            slots: [B], all different.
            caps: [B], the highest rung that each request may have.
            fixed: Other requests of the same steps, whose trees are not chosen here.
            missed: [B, 2], feature rows that the draft of each request has missed and would need
                for a tree: rows that were kept, and rows to compute again. None: no draft has
                missed any.
            num_left: [B], tokens that each request may still get; None: not known.
            num_coming: Requests whose prompts are being read. If all requests would rest once these
                run as well, no resting request gets a tree now: trees would only delay the prompts.
            num_prompt_rows: Rows of these prompts that have not been read yet.
        Mutates: `rungs`, `needs_no_rows`.
        """
        self._decided_round = self._round
        if not len(slots):
            return
        self._renew_gains()
        self._prompts.expect(num_coming, num_prompt_rows, len(slots) + fixed.num_requests)
        now = self._now(slots, fixed, num_coming)
        caps = self._caps_of_rests(now, caps)
        deal = self._unless_little(now, self._deal(now, caps))
        if deal.limit:
            is_resting = (now.had == 0) & ~now.is_new
            if missed is not None:
                is_resting |= has_many(missed)
            if is_resting.any():
                staying = self._unless_little(now, self._deal(now, np.where(is_resting, 0, caps)))
                if not pays_back(deal, staying, is_resting, missed, num_left, self.costs):
                    deal = staying
        self._limit, rungs, rest = deal.limit, deal.rungs, _LEAST_REST
        if deal.limit:
            if self._tries_plain(now, deal):
                rungs, rest = np.zeros_like(rungs), _PLAIN_TRY_ROUNDS
            else:
                self._probe.note_trees(len(slots))
        else:
            self._probe.note_rest()
            if not self._prompts.are_long:
                num_rows = len(slots) + fixed.num_rows
                rungs = self._probe.rungs(
                    self._round, slots, now.had, caps, missed, num_rows=num_rows
                )
        counts = np.bincount(rungs)
        self._most_have = int(counts.argmax())
        if counts[0]:
            begins_rest = slots[(rungs == 0) & ((now.had > 0) | now.is_new)]
            if len(begins_rest):
                self._rests_until[begins_rest] = self._round + rest
                self._last_rest_ends = max(self._last_rest_ends, self._round + rest)
        self.rungs[slots] = rungs
        self._is_new[slots] = False
        self.needs_no_rows[slots] = not deal.limit and (
            self._rests_for_long(now.num_requests) or now.classes <= LAST_HOPELESS_CLASS
        )

    def _now(self, slots: Ints, fixed: FixedRounds, num_coming: int) -> _Now:
        had, is_new = self.rungs.take(slots), self._is_new.take(slots)
        held, favour = self._held(had, is_new)
        classes = self.acceptance.classes(slots)
        return _Now(slots, fixed, num_coming, had, is_new, classes, held, favour)

    def _unless_little(self, now: _Now, deal: Deal) -> Deal:
        """Return a deal, or no trees if these bring little more and there are no others."""
        fixed, has_trees, is_gpu = now.fixed, self._limit > 0, self.costs.is_padded
        if not deal.limit or fixed.num_trees or (has_trees and not is_gpu):
            return deal
        rest = self._dealer.rest(len(now.slots), fixed)
        tokens_per_s = deal.tokens_per_s
        if self._prompts.expected or self._prompts.are_long:  # they do not count here
            tokens_per_s = self._dealer.tokens_per_s(now.classes, deal.rungs, fixed)
        least = _LEAST_KEPT_GAIN if has_trees else _LEAST_GAIN
        return rest if tokens_per_s / rest.tokens_per_s - 1 < least else deal

    def _tries_plain(self, now: _Now, deal: Deal) -> bool:
        """Return whether the next rounds have no trees, to learn what such rounds take."""
        if now.fixed.num_trees or now.num_coming:
            return False
        tokens_per_s, now_s = deal.tokens_per_s, self._clock()
        return self.costs.plain_is_worth_a_try(now.num_requests, tokens_per_s, now_s)

    def _caps_of_rests(self, now: _Now, caps: Ints) -> Ints:
        """Return `caps` with 0 for requests that must rest, or go on resting; see `decide`."""
        if self._are_too_many(now.num_requests):
            return np.zeros_like(caps)
        if self._last_rest_ends > self._round:
            caps = np.where(self._rests_until.take(now.slots) > self._round, 0, caps)
        if now.num_coming and self.would_rest(now.num_requests + now.num_coming):
            caps = np.where(now.had == 0, 0, caps)
        return caps

    def _deal(self, now: _Now, caps: Ints) -> Deal:
        """Return the best deal.

        While prompts are read for a short time, a request rests only if resting is best both beside
        rows of prompts and without them: beside prompts trees gain little, but a draft must keep up
        to have trees once the prompts have been read. While prompts are read for long, see
        `_deal_beside_prompts`.
        """
        fixed, favour = now.fixed, now.favour
        options = self._dealer.options(now.classes, caps, now.held, fixed)
        if self._prompts.are_long:
            return self._deal_beside_prompts(now, options)
        mixed = fixed
        if self._prompts.expected:
            mixed = fixed._replace(mixed_per_token=self._prompts.per_token)
        deal = self._dealer.choose(options, mixed, favour=favour)
        if not self._prompts.are_expected or deal.rungs.all():
            return deal
        without = self._dealer.choose(options, fixed, favour=favour)
        if not deal.limit:
            return without
        keeps_up = (deal.rungs == 0) & (without.rungs > 0)
        if not keeps_up.any():
            return deal
        rungs = np.where(keeps_up, without.rungs, deal.rungs)
        if self.costs.rows[rungs].sum() + fixed.num_rows > self.costs.most_rows:
            return without
        return Deal(rungs, int(rungs.max()), self._dealer.tokens_per_s(now.classes, rungs, mixed))

    def _deal_beside_prompts(self, now: _Now, options: Options) -> Deal:
        """Return the best deal while prompts are read for long: no trees, unless the tokens that
        trees add take less time now than the same tokens will take after the prompts.
        """
        classes, fixed = now.classes, now.fixed._replace(mixed_per_token=math.inf)
        deal = self._dealer.choose(options, fixed, favour=now.favour)
        rest = self._dealer.rest(len(classes), fixed)
        if not deal.limit:
            return rest
        then = self._forecast(now.num_requests + now.num_coming).tokens_per_s
        num_rest = len(classes) + fixed.num_tokens
        num_more = self._dealer.num_tokens(classes, deal.rungs) - len(classes)
        more_s = (num_rest + num_more) / deal.tokens_per_s - num_rest / rest.tokens_per_s
        return deal if num_more > then * self._beside_long_reading * more_s else rest

    def _held(self, had: Ints, is_new: NDArray[np.bool_]) -> tuple[Ints, float]:
        """Return `held` and `favour` of _Now: the rung that a request has, or if it is new the most
        frequent one.
        """
        num_new = np.count_nonzero(is_new)
        if num_new == len(had):
            return had, 0.0
        # Rungs above 0 are those of a trial if all rest.
        held = had.copy() if self._limit else np.zeros_like(had)
        if num_new:
            held[is_new] = np.bincount(held[~is_new]).argmax()
        is_unfavoured = not self._num_decisions % _UNFAVOURED_DECISION
        return held, self._favour if self._prompts.are_rare and not is_unfavoured else 0.0

    @property
    def _favour(self) -> float:
        return _FAVOUR if self.costs.is_padded else _FAVOUR_CPU

    def note_step(
        self,
        slots: Ints,
        num_nodes: Ints,
        num_accepted: Ints,
        times: StepTimes,
        *,
        num_steps: Ints | None = None,
    ) -> None:
        """Learn from a step that has ended.

        Args:
            slots: [B], slots of the requests that had a round in the step.
            num_nodes: [B], nodes of their trees, roots included.
            num_accepted: [B], accepted drafts, bonus tokens excluded.
            times: What the time of the step is learned from.
            num_steps: [B], most steps of each tree; 0: the tree has the shape of no rung, whatever
                its size. None: all trees are as deep as their rungs.
        """
        self._round += 1
        num_tokens = len(slots) + sum(num_accepted.tolist())
        if self._prompts.note_step(num_tokens, has_prompts=times.has_prompts):
            self._decided_round = -DECISION_ROUNDS
        rungs = self._rung_of_size.take(num_nodes, mode="clip")
        has_tree = rungs > 0
        # A tree may still be of the rung before the last decision: its own rung says what the draft
        # took.
        self._note_time(slots, np.where(has_tree, rungs, times.waited_rungs), times)
        # Trees of other sizes were cut, or have no rung's shape.
        known = self._is_tree.take(num_nodes, mode="clip")
        if num_steps is not None:
            known &= num_steps > 0
        num_known = np.count_nonzero(known)
        if num_known:
            self._probe.note_round()
            if num_known == len(slots):
                self.acceptance.note_rounds(slots, rungs, num_accepted, num_steps)
            else:
                steps = None if num_steps is None else num_steps[known]
                self.acceptance.note_rounds(slots[known], rungs[known], num_accepted[known], steps)
        if len(slots):
            self.acceptance.recentre(slots)
        if num_known < len(slots) and not self._prompts.are_long:
            resting = slots[~has_tree]
            if len(resting):
                self.acceptance.note_rests(resting, returns=self._limit > 0)

    def _note_time(self, slots: Ints, rungs: Ints, times: StepTimes) -> None:
        """Learn what a round took. A round that took much longer than expected makes a decision
        due.
        """
        timed = self._rounds.note_step(slots, rungs, times)
        if timed is None:
            return
        if timed.took_s > _BAD_SURPRISE * self.costs.round_s(timed.kind):
            self._decided_round = -DECISION_ROUNDS
        self.costs.note_round(timed.kind, timed.took_s, timed.ended_s)

    def _renew_gains(self) -> None:
        self._num_decisions += 1
        if self._num_decisions >= self._new_gains_at:
            self._new_gains_at += min(self._num_decisions, _LAST_GAINS)
            self._dealer = Dealer(self.acceptance.gains(), self.costs)


def _rung_of_size(rows: Ints) -> Ints:
    """Return, by the number of nodes of a tree, the highest rung with at most as many nodes."""
    sizes = np.arange(2 + int(rows[-1]))
    return np.maximum(np.searchsorted(rows, sizes, side="right") - 1, 0)
