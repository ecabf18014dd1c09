"""Deal the rows of a step to requests, so that a round brings the most tokens per second.

A round takes the forward of its rows, what its hosts do for it, and, whatever its other trees are,
what so many trees of the largest rung take. So for each rung that the largest tree may have: every
request starts with its root, and steps up the ladder are dealt in order of tokens per row, over all
requests, until a step of so many rows is full. Of all these steps and rungs the best is taken. A
request's own steps come in this order by themselves, because those are left out that bring less per
row than the next one with them does.

All requests of a class and a cap are alike, so what is dealt are classes, by counts.

Source: greedy allocation by marginal utility, as in DSpark's scheduler and arXiv:2406.14066.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from target_service.budgets.costs import RoundCosts, RoundKind

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_ROUNDING = 1e-6


class FixedRounds(NamedTuple):
    """Requests of the same steps whose trees are not to be chosen.

    Args:
        num_requests: So many.
        num_rows: Of all their trees.
        num_tokens: That a round of all of them is expected to bring.
        rung: Largest rung that their growth is like; 0: none of them has a tree.
        num_trees: So many of them have trees.
        mixed_per_token: Rounds with rows of prompts for each token that all requests get; such a
            round has no stairs to fill, because prompts take what is left.
    """

    num_requests: int = 0
    num_rows: int = 0
    num_tokens: float = 0.0
    rung: int = 0
    num_trees: int = 0
    mixed_per_token: float = 0.0


NOTHING_FIXED = FixedRounds()


class Deal(NamedTuple):
    """What requests get.

    Args:
        rungs: [B], 0: the root alone.
        limit: The highest of them.
        tokens_per_s: Expected of the round, of all requests together.
    """

    rungs: Ints
    limit: int
    tokens_per_s: float


class _Climb(NamedTuple):
    """Steps up the ladder, those with the most tokens per row first, [I] each.

    Args:
        key: Which requests take a step: those of a cap and a class, cap * C + class.
        rung: That the step leads to.
        each: [3, I], rows and tokens that a request has more than before, and 1 if it had the root
            alone, else 0.
    """

    key: Ints
    rung: Ints
    each: Floats

    @property
    def rows(self) -> Floats:
        """Return [I], rows of a request more than before."""
        rows: Floats = self.each[0]
        return rows


class _Plan(NamedTuple):
    """A way to deal: the steps of a climb, in order, up to so many rows.

    Args:
        score: Tokens per second.
        limit: Rung that no request is above.
        counts: [R * C], requests by key.
        num_rows: Beside the roots'.
    """

    score: float
    limit: int
    climb: _Climb
    counts: Ints
    num_rows: float


class Dealer:
    """Deals by one table of gains.

    Args:
        gains: [C, R], tokens expected of a round of each class at each rung; rung 0 brings 1.
    """

    def __init__(self, gains: Floats, costs: RoundCosts) -> None:
        self._gains = gains
        self._costs = costs
        self._rows = costs.rows.astype(np.float64)
        self._num_classes, self._num_rungs = gains.shape
        self._climbs = [self._climb(cap) for cap in range(self._num_rungs)]

    def deal(
        self,
        classes: Ints,
        caps: Ints,
        held: Ints,
        fixed: FixedRounds = NOTHING_FIXED,
        *,
        favour: float = 0.0,
    ) -> Deal:
        """Return what requests get.

        Args:
            classes: [B].
            caps: [B], the highest rung that each may have.
            held: [B], what each has now. All of them keep it unless another deal brings more.
            favour: How much more, as a part of the tokens per second.
        """
        kept = np.minimum(held, caps)
        best = self._deal_of(classes, kept, fixed)
        least = best.tokens_per_s * (1.0 + favour)
        deals = [self._deal_of(classes, np.zeros_like(classes), fixed)]
        for plan in self._plans(classes, caps, fixed):
            deals.append(self._deal_of(classes, self._rungs(plan, classes, caps, held), fixed))
        for deal in deals:
            if deal.tokens_per_s > least:
                least, best = deal.tokens_per_s, deal
        return best

    def _deal_of(self, classes: Ints, rungs: Ints, fixed: FixedRounds) -> Deal:
        rate = self.tokens_per_s(classes, rungs, fixed)
        return Deal(rungs, int(rungs.max(initial=0)), rate)

    def tokens_per_s(self, classes: Ints, rungs: Ints, fixed: FixedRounds = NOTHING_FIXED) -> float:
        """Return what a round is expected to bring per second, if requests get these rungs."""
        tokens = float(self._gains[classes, rungs].sum()) + fixed.num_tokens
        kind = RoundKind(
            num_requests=len(classes) + fixed.num_requests,
            num_rows=float(self._rows[rungs].sum()) + fixed.num_rows,
            rung=max(int(rungs.max(initial=0)), fixed.rung),
            num_trees=int(np.count_nonzero(rungs)) + fixed.num_trees,
        )
        seconds = self._costs.round_s(kind)
        seconds += float(self._costs.delay_s(kind.rung, np.array(kind.num_trees)))
        saved_s = self._costs.forward_s(kind.num_rows) - self._costs.marginal_s(kind.num_rows)
        return tokens / (seconds - min(1.0, fixed.mixed_per_token * tokens) * saved_s)

    def _plans(self, classes: Ints, caps: Ints, fixed: FixedRounds) -> list[_Plan]:
        """Return the best plan that fills a step, and the best by which all get what they may."""
        costs = self._costs
        base = len(classes) + fixed.num_rows
        tokens = len(classes) + fixed.num_tokens
        sizes, sizes_s = costs.sizes_above(base)
        if not len(sizes):
            return []
        num_all = len(classes) + fixed.num_requests
        beside_s = costs.host_s(num_all)
        counts = self._count(classes, caps)
        above = counts[::-1].cumsum(axis=0)[::-1]
        present = np.flatnonzero(counts.any(axis=1)).tolist()
        filled: list[_Plan] = []
        whole: list[_Plan] = []
        for limit in range(1, 1 + max(present, default=0)):
            folded = _fold(counts, above, limit)
            climb = self._merged([cap for cap in present if 0 < cap < limit], limit)
            if not len(climb.key):
                continue
            num_rows, gained, num_trees = _add_up(climb, folded)
            total = float(num_rows[-1])
            num_sizes = int(np.searchsorted(sizes, base + total))
            # Steps that are filled, and those after which another class or rung is next.
            ends = num_rows[1:][(folded[climb.key] > 0) & (base + num_rows[1:] <= sizes[-1])]
            used = np.concatenate((sizes[:num_sizes] - base, ends))
            seconds = np.concatenate((sizes_s[:num_sizes], costs.forwards_s(base + ends)))
            trees = np.ceil(np.interp(used, num_rows, num_trees)).astype(np.int64)
            rung, trees = max(limit, fixed.rung), trees + fixed.num_trees
            draft_s = costs.draft_s(rung, trees, num_all, base + used)
            draft_s = draft_s + costs.delay_s(rung, trees)
            brought = tokens + np.interp(used, num_rows, gained)
            mixed = np.minimum(1.0, fixed.mixed_per_token * brought)
            seconds -= mixed * (seconds - costs.marginal_s(base + used))
            scores = brought / (seconds + beside_s + draft_s)
            for plans, part in ((filled, slice(num_sizes)), (whole, slice(num_sizes, None))):
                if len(scores[part]):
                    place = int(scores[part].argmax())
                    score, rows = float(scores[part][place]), float(used[part][place])
                    plans.append(_Plan(score, limit, climb, folded, rows))
        return [max(plans, key=lambda plan: plan.score) for plans in (filled, whole) if plans]

    def _count(self, classes: Ints, caps: Ints) -> Ints:
        """Return [R, C], requests by cap and class."""
        keys = caps * self._num_classes + classes
        counts = np.bincount(keys, minlength=self._num_rungs * self._num_classes)
        return counts.reshape(self._num_rungs, self._num_classes)

    def _rungs(self, plan: _Plan, classes: Ints, caps: Ints, held: Ints) -> Ints:
        """Return the rung of each request by a plan."""
        climb = plan.climb
        ends = np.cumsum(plan.counts[climb.key] * climb.rows)
        num_whole = int(np.searchsorted(ends, plan.num_rows + _ROUNDING, side="right"))
        rung_of = np.zeros(len(plan.counts), dtype=np.int64)
        rung_of[climb.key[:num_whole]] = climb.rung[:num_whole]  # the last step counts
        keys = np.minimum(caps, plan.limit) * self._num_classes + classes
        rungs = rung_of[keys]
        if num_whole < len(ends):  # some of the next ones still fit
            left = plan.num_rows - (float(ends[num_whole - 1]) if num_whole else 0.0)
            num_more = int((left + _ROUNDING) // climb.rows[num_whole])
            alike = np.flatnonzero(keys == climb.key[num_whole])
            rung = climb.rung[num_whole]
            order = np.argsort(held[alike] < rung, kind="stable")
            rungs[alike[order[:num_more]]] = rung
        return rungs

    def _merged(self, caps: Sequence[int], limit: int) -> _Climb:
        """Return the steps of requests with these caps, and of those that are limited."""
        if not caps:
            return self._climbs[limit]
        return _join([self._climbs[cap] for cap in (*caps, limit)])

    def _climb(self, cap: int) -> _Climb:
        """Return the steps of requests that may have rungs up to `cap`."""
        gains, rows = self._gains[:, : cap + 1], self._rows[: cap + 1]
        classes = np.arange(self._num_classes)
        at = np.zeros(self._num_classes, dtype=np.int64)
        parts = [_Climb(at[:0], at[:0], np.zeros((3, 0)))]
        for _ in range(cap):
            more_rows = rows - rows[at, None]
            more = gains - gains[classes, at][:, None]
            slope = np.where(more_rows > 0, more / np.maximum(more_rows, 1.0), 0.0)
            to = slope.argmax(axis=1)
            going = np.flatnonzero(slope[classes, to] > 0)
            to = to[going]
            key = cap * self._num_classes + going
            before = at[going]
            gained = gains[going, to] - gains[going, before]
            each = np.array([rows[to] - rows[before], gained, before == 0], dtype=np.float64)
            parts.append(_Climb(key, to, each))
            at[going] = to
        return _join(parts)


def _fold(counts: Ints, above: Ints, limit: int) -> Ints:
    """Return [R * C], requests by cap and class, if no cap is above a limit."""
    folded = counts.copy()
    folded[limit] = above[limit]
    return folded.ravel()


def _add_up(climb: _Climb, counts: Ints) -> Floats:
    """Return rows, tokens and trees of all steps before each, and of all, [3, I + 1]."""
    sums = np.zeros((3, 1 + len(climb.key)))
    np.cumsum(climb.each * counts[climb.key], axis=1, out=sums[:, 1:])
    return sums


def _join(climbs: Sequence[_Climb]) -> _Climb:
    """Return the steps of several climbs as one; of one cap and class they stay in order."""
    each = np.concatenate([climb.each for climb in climbs], axis=1)
    best_first = np.argsort(-each[1] / each[0], kind="stable")
    return _Climb(
        np.concatenate([climb.key for climb in climbs])[best_first],
        np.concatenate([climb.rung for climb in climbs])[best_first],
        each[:, best_first],
    )
