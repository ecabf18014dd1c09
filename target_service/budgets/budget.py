"""The budget of a target's trees: decides, every few rounds, which rung of the ladder each gets.

A decision is a `Deal` over what is known of requests (`Acceptance`) and rounds (`RoundCosts`). Here
is what happens over time: decisions last a few rounds, all requests keep what they have unless
another deal brings more, a request that rests does so for a while, and where all rest a few are
tried again, less and less often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.messages import TreeShape
from target_service.budgets.acceptance import LAST_HOPELESS_CLASS, Acceptance
from target_service.budgets.costs import RoundCosts, RoundKind, bucket_size
from target_service.budgets.deal import NOTHING_FIXED, Deal, Dealer, FixedRounds, Options
from target_service.budgets.probe import Probe
from target_service.features import WOKEN_ROWS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

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
# Of a round in the means of how many have rows of prompts, and of their tokens.
_MIXED_WEIGHT = 0.15
# Fewer are none: some dozens of rounds ago there were prompts.
_LEAST_MIXED = 0.01
# Where more have, requests begin all the time: what they have was decided for fewer of them, and
# once the prompts have been read, for other rows.
_MOSTLY_MIXED = 0.3
# So many rounds without prompts, and none being read, and the next ones have none either.
_PROMPTS_ENDED_AFTER = 3
# A draft gets what it has missed if that pays within the time in which every request gets so many
# tokens, or what it has left ..
_PAID_BACK_AFTER = 64
# .. and trees come so many rounds after its last row. So many rows that were kept, which hosts copy
# and it reads, cost what one does that is computed again; and fewer than so many cost nothing.
_FIRST_TREE_AFTER = 6
_KEPT_PER_REPLAYED, _MANY_MISSED = 5, 16
# A request that rests does so for at least so many rounds: a draft must read what came meanwhile.
_LEAST_REST = 4
# .. but for so many where rounds without trees are tried, of which the first says nothing.
_PLAIN_TRY_ROUNDS = 6
# While prompts of so many requests are read that take as long as so many rounds without trees,
# requests rest where trees bring less than none beside prompts; until those that are left take so
# many. A long prompt of one is no reason to keep others without trees.
_MANY_COMING, _LONG_READING, _READING_ENDS = 8, 60, 5
# What trees take there, by what they are known to take: with those of 128 requests steps of an H200
# took half as much longer as their rows and the draft say, for it reads these prompts as well.
_BESIDE_LONG_READING = 1.5
# Where all requests rest some are tried, with trees of this rung at most.
_PROBE_RUNG, _MOST_PROBED = 3, 4
_MANY_ROWS = 1 << 40
# Decisions for which it is remembered whether so many requests would all rest.
_FORECAST_DECISIONS = 16
# Gains by class change slowly: decisions after which they are computed anew, at first and later.
_FIRST_GAINS, _LAST_GAINS = 2, 128


class StepTimes(NamedTuple):
    """What a step was like whose time is learned from.

    Args:
        num_rows: Of its trees.
        num_requests: That run, in this step or in others.
        waited_rungs: [B], of the trees that it waited for, should they not have come; 0: none.
        has_prompts: It had rows of prompts as well.
        is_clean: It had not, and the draft did not have many of these to read either.
    """

    num_rows: int
    num_requests: int
    waited_rungs: Ints
    has_prompts: bool
    is_clean: bool


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
        # Of each slot: when its last round ended, and the rows and rung of that round's tree.
        self._ended_s = np.zeros(num_slots)
        self._num_rows = np.zeros(num_slots)
        self._ran_rungs: Ints = np.zeros(num_slots, dtype=np.int64)
        self._was_clean = False
        # Of so many requests: when it was asked last, and the deal.
        self._forecasts: dict[int, tuple[int, Deal]] = {}
        # Means of rounds: which part has rows of prompts, and tokens of a round.
        self._mixed, self._tokens = 0.0, 1.0
        self._num_clear = 0  # rounds since one had rows of prompts
        self._coming_mixed = 0.0  # what the mean is expected to be of the next rounds
        self._reads_long = False  # prompts that take many rounds
        self._keeps_deals = True  # another one must bring some more

    def begin(self, slot: int) -> None:
        """Take note that another request has a slot; it gets what most requests like it have."""
        self.acceptance.begin(slot)
        self._ended_s[slot] = 0.0
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
        has_ended = not num_coming and self._num_clear >= _PROMPTS_ENDED_AFTER
        mixed_before, self._coming_mixed = self._coming_mixed, 0.0 if has_ended else self._mixed
        self._keeps_deals = max(mixed_before, self._coming_mixed) < _MOSTLY_MIXED
        self._note_reading(num_coming, num_prompt_rows, len(slots) + fixed.num_requests)
        caps = self._caps_of_rests(slots, caps, fixed.num_requests, num_coming)
        deal = self._deal(slots, caps, fixed, num_coming)
        if deal.limit and missed is not None and (is_behind := _has_many(missed)).any():
            lower_caps = np.where(is_behind, 0, caps)
            staying = self._deal(slots, lower_caps, fixed, num_coming)
            if not self._pays_back(deal, staying, missed, num_left):
                caps, deal = lower_caps, staying
        self._limit, rungs, rest = deal.limit, deal.rungs, _LEAST_REST
        if deal.limit:
            if self._tries_plain(deal, fixed, num_coming):
                rungs, rest = np.zeros_like(rungs), _PLAIN_TRY_ROUNDS
            else:
                self._probe.reset(len(slots))
        elif not self._reads_long:
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

    def _note_reading(self, num_coming: int, num_prompt_rows: int, num_requests: int) -> None:
        """Take note of how long prompts will be read; on a CPU their rows cost no less.

        Args:
            num_requests: That run.
        """
        round_s = self.costs.round_s(RoundKind(num_requests, num_requests))
        num_rounds = self.costs.marginal_s(float(num_prompt_rows)) / round_s
        if self._reads_long:
            self._reads_long = num_rounds > _READING_ENDS
        elif self.costs.is_padded and num_coming >= _MANY_COMING:
            self._reads_long = num_rounds > _LONG_READING

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
        if self._reads_long:
            return self._deal_beside_prompts(options, held, favour, num_coming)
        mixed = fixed._replace(mixed_per_token=self._coming_mixed / self._tokens)
        deal = self._dealer.choose(options, held, mixed.mixed_per_token, favour=favour)
        if self._coming_mixed < _LEAST_MIXED or deal.rungs.all():
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

    def _pays_back(self, deal: Deal, staying: Deal, missed: Ints, num_left: Ints | None) -> bool:
        """Return whether a deal brings so much more than one in which no draft gets what it has
        missed, that within some rounds it makes up for that.
        """
        woken = missed[deal.rungs > 0]
        lost_s = self.costs.marginal_s(float(_replayed(woken).sum()))
        num_tokens = float(_PAID_BACK_AFTER)
        if num_left is not None:
            num_tokens = float(np.minimum(num_left, _PAID_BACK_AFTER).mean())
        # Drafts get so many rows with each round: on average after half of these rounds.
        num_tokens -= _FIRST_TREE_AFTER + float(woken.sum()) / WOKEN_ROWS / 2
        rounds_s = max(num_tokens, 0.0) * len(deal.rungs) / staying.tokens_per_s
        return deal.tokens_per_s * rounds_s >= staying.tokens_per_s * (rounds_s + lost_s)

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
        return held, self._favour if self._keeps_deals and not is_unfavoured else 0.0

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
        self._note_mixed(len(slots) + int(num_accepted.sum()), times)
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
        if len(resting) and not self._reads_long:
            self.acceptance.note_rests(resting, returns=self._limit > 0)

    def _note_mixed(self, num_tokens: int, times: StepTimes) -> None:
        """Learn how often there are rows of prompts beside trees, and what rounds bring."""
        self._mixed += _MIXED_WEIGHT * (times.has_prompts - self._mixed)
        self._num_clear = 0 if times.has_prompts else self._num_clear + 1
        if self._num_clear == _PROMPTS_ENDED_AFTER:
            self._decided_round = -DECISION_ROUNDS
        if num_tokens:
            self._tokens += _MIXED_WEIGHT * (num_tokens - self._tokens)

    def _note_time(self, slots: Ints, rungs: Ints, times: StepTimes) -> None:
        """Learn what a round of these requests took: from the end of each one's round before."""
        now_s = self._clock()
        ended_s = self._ended_s[slots]
        self._ended_s[slots] = now_s
        self._num_rows[slots] = times.num_rows / max(len(slots), 1)
        self._ran_rungs[slots] = rungs
        is_clean, self._was_clean = times.is_clean and self._was_clean, times.is_clean
        if not is_clean or not len(slots) or not ended_s.all():
            return
        # Where requests without trees do not wait for the others, theirs are shorter.
        with_trees = ended_s[rungs > 0]
        began_s = _median(with_trees if len(with_trees) else ended_s)
        kind = self._kind_since(began_s, max(times.num_requests, len(slots)))
        if kind.rung and not len(with_trees):
            return
        took_s = now_s - began_s
        if took_s > _BAD_SURPRISE * self.costs.round_s(kind):
            self._decided_round = -DECISION_ROUNDS
        self.costs.note_round(kind, took_s, now_s)

    def _kind_since(self, began_s: float, num_requests: int) -> RoundKind:
        """Return what a round of all requests is like, by the rounds that have ended since.

        Requests may take turns, with other trees in each step; those that had no round since are
        taken to be like those that had.
        """
        ran = np.flatnonzero(self._ended_s > began_s)
        rungs = self._ran_rungs[ran]
        scale = num_requests / len(ran)
        return RoundKind(
            num_requests=num_requests,
            num_rows=round(self._num_rows[ran].sum() * scale),
            rung=int(rungs.max()),
            num_trees=round(np.count_nonzero(rungs) * scale),
        )

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
            lost = np.zeros_like(caps) if missed is None else _replayed(missed)
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


def _replayed(missed: Ints) -> Ints:
    """Return what rows that drafts have missed cost, in rows that are computed again.

    Args:
        missed: [B, 2], as of `TreeBudget.decide`.
    """
    return missed[:, 1] + missed[:, 0] // _KEPT_PER_REPLAYED


def _has_many(missed: Ints) -> NDArray[np.bool_]:
    """Return of which requests drafts have missed so much that it counts."""
    return (missed[:, 1] > 0) | (missed[:, 0] >= _MANY_MISSED)


def _median(values: Floats) -> float:
    """Return what np.median does, in a third of its time for a few hundred values."""
    ordered, half = np.sort(values), len(values) // 2
    if len(values) % 2:
        return float(ordered[half])
    return float(ordered[half - 1] + ordered[half]) / 2


def _rung_of_size(rows: Ints) -> Ints:
    """Return the highest rung that has no more nodes than a tree, by the nodes of the tree."""
    sizes = np.arange(2 + int(rows[-1]))
    return np.maximum(np.searchsorted(rows, sizes, side="right") - 1, 0)
