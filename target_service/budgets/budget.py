"""The budget of a target's trees: decides, every few rounds, which rung of the ladder each gets.

A decision is a `Deal` over what is known of requests (`Acceptance`) and rounds (`RoundCosts`). Here
is what happens over time: decisions last a few rounds, all requests keep what they have unless
another deal brings more, a request that rests does so for a while, and where all rest a few are
tried again, less and less often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shared.messages import TreeShape
from target_service.budgets.acceptance import LAST_HOPELESS_CLASS, Acceptance
from target_service.budgets.costs import RoundCosts, bucket_size
from target_service.budgets.deal import NOTHING_FIXED, Deal, Dealer, FixedRounds, Options
from target_service.budgets.missed import has_many, pays_back, replayed
from target_service.budgets.probe import Probe
from target_service.budgets.prompt_rounds import PromptRounds
from target_service.budgets.round_timer import RoundTimer, StepTimes

Ints = NDArray[np.int64]

DECISION_ROUNDS = 4
"""Rounds that a decision is good for, while the same requests run."""

# Tokens per second that a change must bring, as a part of all; more on a CPU, whose rounds scatter
# because others use it as well.
_FAVOUR, _FAVOUR_CPU = 0.02, 0.1
# .. and that trees must bring more than none, or drafts do not read prompts for them.
_FAVOUR_PROMPTS = 0.05
# One decision in so many favours nothing: what single requests lose by it is little for all.
_UNFAVOURED_DECISION = 16
# A round that takes so many times what was expected is reason enough to decide anew.
_BAD_SURPRISE = 1.3
# A request that rests does so for at least so many rounds: a draft must read what came meanwhile.
_LEAST_REST = 4
# .. but for so many where rounds without trees are tried, of which the first says nothing.
_PLAIN_TRY_ROUNDS = 6
# What trees take while many prompts are read, by what they are known to take: with those of 128
# requests steps of an H200 took half as much longer as their rows and the draft say, for it reads
# these prompts as well.
_BESIDE_LONG_READING = 1.5
# Where all requests rest some are tried, with trees of this rung at most.
_PROBE_RUNG, _MOST_PROBED = 3, 4
_MANY_ROWS = 1 << 40
# Decisions for which it is remembered whether so many requests would all rest.
_FORECAST_DECISIONS = 16
# Gains by class change slowly: decisions after which they are computed anew, at first and later.
_FIRST_GAINS, _LAST_GAINS = 2, 128


class TreeBudget:
    """Decides for all requests of a target that may have trees of its choice.

    Args:
        num_slots: Requests that there can be at once; each has a slot, its row of the page table.
        clock: When the last step ended, monotonic, seconds.
    """

    def __init__(
        self,
        costs: RoundCosts,
        ladder: Sequence[TreeShape],
        num_slots: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.costs = costs
        self.acceptance = Acceptance(ladder, num_slots)
        self.rungs: Ints = np.zeros(num_slots, dtype=np.int64)
        """Of each slot, as decided last; 0: the root alone."""
        self.is_hopeless = np.zeros(num_slots, dtype=bool)
        """Of each slot: all rest, and nothing is expected of this one's trees with fewer others
        either.
        """
        self._clock = clock
        self._rung_of_size = _rung_of_size(costs.rows)
        self._is_whole = np.isin(np.arange(len(self._rung_of_size)), costs.rows)
        self._dealer = Dealer(self.acceptance.gains(), costs)
        self._num_decisions = 0
        self._new_gains_at = _FIRST_GAINS
        self._limit = 0
        self._most_have = 0
        self._round = 0
        self._decided_round = -DECISION_ROUNDS
        self._is_new = np.ones(num_slots, dtype=bool)  # nothing was decided yet
        self._rests_until = np.zeros(num_slots, dtype=np.int64)
        self._probe = Probe()
        self._prompts = PromptRounds(costs)
        self._rounds = RoundTimer(num_slots, clock)
        # Of so many requests: when it was asked last, and the deal.
        self._forecasts: dict[int, tuple[int, Deal]] = {}

    def begin(self, slot: int) -> None:
        """Take note that another request has a slot; it gets what most requests like it have."""
        self.acceptance.begin(slot)
        self._rounds.begin(slot)
        self._rests_until[slot] = 0
        self._is_new[slot] = True
        self.is_hopeless[slot] = False
        self.rungs[slot] = 0
        self._decided_round = -DECISION_ROUNDS

    def would_rest(self, num_requests: int) -> bool:
        """Return whether trees would pay for none of so many requests, all as easy as the mean."""
        if not self._num_decisions or num_requests <= 1:
            return self.expects_nothing
        return not self._forecast(num_requests).limit

    def _forecast(self, num_requests: int) -> Deal:
        """Return the deal of so many requests, all as easy as the mean."""
        count, era = bucket_size(num_requests), self._num_decisions // _FORECAST_DECISIONS
        known = self._forecasts.get(count)
        if known is None or known[0] != era:
            classes = np.full(num_requests, self.acceptance.mean_class)
            caps = np.full(num_requests, len(self.costs.rows) - 1)
            favour = max(self._favour, _FAVOUR_PROMPTS)
            deal = self._dealer.deal(classes, caps, np.zeros_like(caps), favour=favour)
            known = self._forecasts[count] = era, deal
        return known[1]

    @property
    def expects_nothing(self) -> bool:
        """Return whether nothing is expected of the trees of a request that is new."""
        return self._num_decisions > 0 and self.acceptance.mean_class <= LAST_HOPELESS_CLASS

    def join(self, slot: int, cap: int) -> None:
        """Let a request that is new have what most others were given, until the next decision.

        Args:
            cap: The highest rung that it may have.
        """
        self.rungs[slot] = min(self._most_have, cap)

    @property
    def is_due(self) -> bool:
        """Return whether `decide` would decide anew."""
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
        """Decide for requests.

        Args:
            slots: [B], all different.
            caps: [B], the highest rung that each may have.
            fixed: Other requests of the same steps.
            missed: [B, 2], rows for the draft of one that rests no more: those that were kept, and
                those to compute again; None: there are none.
            num_left: [B], tokens that each may have yet; None: not known.
            num_coming: Requests whose prompts are being read. If all would rest together with them,
                none begins to have trees, which would only make these wait.
            num_prompt_rows: Of theirs that are left.
        Mutates: `rungs`.
        """
        self._decided_round = self._round
        if not len(slots):
            return
        self._renew_gains()
        self._prompts.expect(num_coming, num_prompt_rows, len(slots) + fixed.num_requests)
        caps = self._caps_of_rests(slots, caps, fixed.num_requests, num_coming)
        deal = self._deal(slots, caps, fixed, num_coming)
        if deal.limit and missed is not None and (is_behind := has_many(missed)).any():
            lower_caps = np.where(is_behind, 0, caps)
            staying = self._deal(slots, lower_caps, fixed, num_coming)
            if not pays_back(deal, staying, missed, num_left, self.costs):
                caps, deal = lower_caps, staying
        self._limit, rungs, rest = deal.limit, deal.rungs, _LEAST_REST
        if deal.limit:
            if self._tries_plain(deal, fixed, num_coming):
                rungs, rest = np.zeros_like(rungs), _PLAIN_TRY_ROUNDS
            else:
                self._probe.reset(len(slots))
        elif not self._prompts.are_long:
            rungs = self._probed(slots, caps, fixed, missed)
        resting = slots[rungs == 0]
        if len(resting):
            begins_rest = resting[(self.rungs[resting] > 0) | self._is_new[resting]]
            self._rests_until[begins_rest] = self._round + rest
        self.rungs[slots] = rungs
        self._most_have = int(np.bincount(rungs).argmax())
        self._is_new[slots] = False
        self.is_hopeless[slots] = not deal.limit and self._are_hopeless(slots)

    def _tries_plain(self, deal: Deal, fixed: FixedRounds, num_coming: int) -> bool:
        """Return whether rounds without trees are tried instead of a deal."""
        if fixed.num_trees or num_coming:
            return False
        num_requests = len(deal.rungs) + fixed.num_requests
        return self.costs.plain_is_worth_a_try(num_requests, deal.tokens_per_s, self._clock())

    def _are_hopeless(self, slots: Ints) -> NDArray[np.bool_]:
        return self.acceptance.classes(slots) <= LAST_HOPELESS_CLASS

    def _caps_of_rests(self, slots: Ints, caps: Ints, num_fixed: int, num_coming: int) -> Ints:
        """Return the caps, 0 of requests whose rest goes on; see `decide`.

        Args:
            num_fixed: Other requests.
        """
        rests_on = self._rests_until[slots] > self._round
        if num_coming and self.would_rest(len(slots) + num_fixed + num_coming):
            rests_on |= self.rungs[slots] == 0
        return np.where(rests_on, 0, caps) if rests_on.any() else caps

    def _deal(self, slots: Ints, caps: Ints, fixed: FixedRounds, num_coming: int) -> Deal:
        """Return the best deal; a request rests only if that is best beside prompts and without
        them, but for prompts that take long.

        Beside prompts trees bring little more than none, but drafts must keep up to have trees when
        the prompts have been read.
        """
        classes = self.acceptance.classes(slots)
        held, favour = self._held(slots)
        options = self._dealer.options(classes, caps, fixed)
        if self._prompts.are_long:
            return self._deal_beside_prompts(options, held, favour, num_coming)
        mixed = fixed._replace(mixed_per_token=self._prompts.per_token)
        deal = self._dealer.choose(options, held, mixed.mixed_per_token, favour=favour)
        if not self._prompts.are_expected or deal.rungs.all():
            return deal
        without = self._dealer.choose(options, held, fixed.mixed_per_token, favour=favour)
        if not deal.limit:
            return without
        keeps_up = (deal.rungs == 0) & (without.rungs > 0)
        if not keeps_up.any():
            return deal
        rungs = np.where(keeps_up, without.rungs, deal.rungs)
        if self.costs.rows[rungs].sum() + fixed.num_rows > self.costs.most_rows:
            return without
        return Deal(rungs, int(rungs.max()), self._dealer.tokens_per_s(classes, rungs, mixed))

    def _deal_beside_prompts(
        self, options: Options, held: Ints, favour: float, num_coming: int
    ) -> Deal:
        """Return the best deal while prompts are read for long: none, unless the tokens that trees
        bring more come faster than tokens will once all prompts have been read.
        """
        classes, fixed = options.classes, options.fixed._replace(mixed_per_token=1.0)
        deal = self._dealer.choose(options, held, 1.0, favour=favour)
        none = np.zeros_like(classes)
        rest = Deal(none, 0, self._dealer.tokens_per_s(classes, none, fixed))
        if not deal.limit:
            return rest
        then = self._forecast(len(classes) + fixed.num_requests + num_coming).tokens_per_s
        num_rest = len(classes) + fixed.num_tokens
        num_more = self._dealer.num_tokens(classes, deal.rungs) - len(classes)
        more_s = (num_rest + num_more) / deal.tokens_per_s - num_rest / rest.tokens_per_s
        return deal if num_more > then * _BESIDE_LONG_READING * more_s else rest

    def _held(self, slots: Ints) -> tuple[Ints, float]:
        """Return what requests have, those that are new what most have; and how much more tokens
        per second another deal must bring.
        """
        held, is_new = self.rungs[slots], self._is_new[slots]
        num_new = np.count_nonzero(is_new)
        if num_new == len(slots):
            return held, 0.0
        if not self._limit:
            held[:] = 0  # but for those that are tried
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
            slots: [B], the requests whose rounds it ended.
            num_nodes: [B], of their trees, roots included.
            num_accepted: [B], drafts accepted.
            num_steps: [B], that the trees have at most; 0: the tree is no rung's, whatever its
                size. None: all are as deep as their rungs.
        """
        self._round += 1
        num_tokens = len(slots) + int(num_accepted.sum())
        if self._prompts.note_step(num_tokens, has_prompts=times.has_prompts):
            self._decided_round = -DECISION_ROUNDS
        sizes = np.minimum(num_nodes, len(self._rung_of_size) - 1)
        rungs = self._rung_of_size[sizes]
        has_tree = rungs > 0
        # A tree that came may be of the rung before, for which the draft takes another time.
        self._note_time(slots, np.where(has_tree, rungs, times.waited_rungs), times)
        known = has_tree & self._is_whole[sizes]  # others were cut, or are of no rung
        if num_steps is not None:
            known &= num_steps > 0
        if known.any():
            self._probe.num_rounds += 1
            kept = slice(None) if known.all() else known
            steps = None if num_steps is None else num_steps[kept]
            self.acceptance.note_rounds(slots[kept], rungs[kept], num_accepted[kept], steps)
        if len(slots):
            self.acceptance.recentre(slots)
        resting = slots[~has_tree]
        if len(resting) and not self._prompts.are_long:
            self.acceptance.note_rests(resting, returns=self._limit > 0)

    def _note_time(self, slots: Ints, rungs: Ints, times: StepTimes) -> None:
        """Learn what a round took; one that took much longer than expected has all decided anew."""
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

    def _probed(self, slots: Ints, caps: Ints, fixed: FixedRounds, missed: Ints | None) -> Ints:
        """Return the rungs of requests none of which would get a tree; a few are tried at times.

        As many as fit beside the roots into the next size of a step, or one. If drafts have missed
        rows of all of them, the one with the fewest, once these take little of the time since.
        """
        rungs = np.zeros_like(caps)
        if not self._probe.is_on(self._round, len(slots)):
            return rungs
        chosen = np.flatnonzero((self.rungs[slots] > 0) & (caps > 0))  # as decided before
        rung = min(_PROBE_RUNG, int(caps.max()))
        if not len(chosen):
            base = len(slots) + fixed.num_rows
            sizes, _ = self.costs.sizes_above(base)
            num_more = max(int(self.costs.rows[rung]) - 1, 1)
            room = (int(sizes[0]) - base) // num_more if len(sizes) else 0
            lost = np.zeros_like(caps) if missed is None else replayed(missed)
            lost = np.where(caps > 0, lost, _MANY_ROWS)
            fewest = int(lost.min())
            if fewest == _MANY_ROWS:
                return rungs
            promise = np.where(lost == fewest, self.acceptance.promise(slots), -np.inf)
            count = min(max(room, 1), _MOST_PROBED, np.count_nonzero(lost == fewest))
            if fewest:
                count, lost_s = 1, self.costs.marginal_s(float(fewest))
                if not self._probe.affords(lost_s, self._round, self._clock()):
                    return rungs
            chosen = np.argsort(-promise, kind="stable")[:count]
        rungs[chosen] = np.minimum(caps[chosen], rung)
        return rungs


def _rung_of_size(rows: Ints) -> Ints:
    """Return the highest rung that has no more nodes than a tree, by the nodes of the tree."""
    sizes = np.arange(2 + int(rows[-1]))
    return np.maximum(np.searchsorted(rows, sizes, side="right") - 1, 0)
