"""Divide the rows of a step among requests, so that a round brings the most tokens per second.

The time of a round has three parts: the forward of its rows, the hosts' work, and the growth of its
trees, which depends on their number and on the largest rung among them alone. So the search runs
once for each largest rung:

1. Every request starts with its root.
2. Climbs (a climb takes one request from one rung to a higher one) are taken in order of expected
   tokens per row, over all requests, until the rows of a step are used up.
3. Each prefix of this order is a candidate; the best candidate of all largest rungs is taken.

The climbs of one request are in the right order by themselves: a climb that brings fewer tokens per
row than it would together with the next climb is merged into that one, so that tokens per row fall
along a request's climbs.

Requests of the same class (expected acceptance) and the same cap (highest rung) are alike, so the
search runs on counts per class and cap. The order of climbs depends on the gains alone and is
computed once; one decision evaluates the candidates of all largest rungs as arrays.

Source: greedy allocation by marginal utility, as in DSpark's scheduler and arXiv:2406.14066.

Shapes: B requests, C classes, R rungs (rung 0 included), L largest rungs (1 .. R - 1), I climbs in
the longest order, P candidates.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from target_service.budgets.costs import RoundCosts, RoundKind

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_ROUNDING = 1e-6
_NONE, _NOBODY = np.zeros(0), np.zeros(0, dtype=np.int64)
# More rows than all climbs of an order take: shifted by multiples of this number, the L orders are
# one sorted table.
_APART = float(1 << 24)


class FixedRounds(NamedTuple):
    """Requests of the same steps whose trees are not chosen by the dealer.

    Args:
        num_requests: Number of these requests.
        num_rows: Rows of all their trees.
        num_tokens: Expected tokens of one round of all of them.
        rung: The largest rung whose growth takes as long as theirs; 0: none of them has a tree.
        num_trees: Number of these requests that have trees.
        mixed_per_token: How often prompts come per token that all requests together get: of rounds
            of n tokens a share of 1 - exp(-n x this) has rows of prompts. The forward of such a
            round costs the same per row: rows of prompts fill the step up to a captured size
            anyway.
    """

    num_requests: int = 0
    num_rows: int = 0
    num_tokens: float = 0.0
    rung: int = 0
    num_trees: int = 0
    mixed_per_token: float = 0.0


NOTHING_FIXED = FixedRounds()


class Deal(NamedTuple):
    """The rung of each request, and what a round with these rungs is expected to bring.

    Args:
        rungs: [B], 0: the root alone.
        limit: The highest of these rungs.
        tokens_per_s: Expected tokens per second of all requests together.
    """

    rungs: Ints
    limit: int
    tokens_per_s: float


class _Climb(NamedTuple):
    """The climbs of requests of one cap, or of several caps; fields as of _Climbs, one row."""

    key: Ints
    rung: Ints
    each: Floats


class _Climbs(NamedTuple):
    """The orders of climbs, [L, I] each. Row `limit - 1` has the climbs if no rung above `limit` is
    allowed, those with the most tokens per row first. The first entry of a row, and the entries
    after its last climb, are padding and belong to no request.

    Args:
        key: Which requests make the climb: those of a cap and a class, cap * C + class; padding:
            R * C.
        counted: Index of the number of these requests in `Dealer._count`.
        rung: The rung that the climb leads to.
        each: [3, L, I], per request: additional rows; additional tokens; 1 if the request had the
            root alone before the climb, else 0.
    """

    key: Ints
    counted: Ints
    rung: Ints
    each: Floats


class Options(NamedTuple):
    """The candidates for a deal, P ways to divide rows: by the largest rung and the rows used.

    Args:
        classes: [B].
        caps: [B], the highest rung that each request may have.
        fixed: Requests whose trees are not chosen.
        climbs: The orders of climbs; None: no request can have a tree, and there is no candidate.
        ends: [L, I], rows of all climbs up to and including each.
        num_filled: The first `num_filled` candidates fill a captured size of a step exactly. The
            others end where all requests of a class and cap have made a climb.
        limit: [P], the largest rung of each candidate.
        used: [P], rows beside roots and the rows of `fixed`.
        tokens: [P], expected tokens of a round of all requests.
        forward_s: [P], time of the forward if the step has no rows of prompts.
        saved_s: [P], how much less the forward costs in a step with rows of prompts: the padding
            is filled with rows that would have to be computed in another step.
        beside_s: Time of the hosts' work.
        draft_s: [P], time of the trees.
    """

    classes: Ints
    caps: Ints
    fixed: FixedRounds
    climbs: _Climbs | None = None
    ends: Floats = _NONE
    num_filled: int = 0
    limit: Ints = _NOBODY
    used: Floats = _NONE
    tokens: Floats = _NONE
    forward_s: Floats = _NONE
    saved_s: Floats = _NONE
    beside_s: float = 0.0
    draft_s: Floats = _NONE

    def best(self, mixed_per_token: float) -> list[int]:
        """Return the best candidate that fills a captured size, and the best of the others.

        Args:
            mixed_per_token: As of FixedRounds.
        """
        forward_s = self.forward_s
        if mixed_per_token:
            forward_s = forward_s + np.expm1(-mixed_per_token * self.tokens) * self.saved_s
        scores = self.tokens / (forward_s + self.beside_s + self.draft_s)
        split = self.num_filled
        ways = [int(scores[:split].argmax())] if split else []
        return [*ways, split + int(scores[split:].argmax())] if split < len(scores) else ways


class Dealer:
    """Finds the best deal, given one table of gains.

    Args:
        gains: [C, R], expected tokens of a round by class and rung; 1 at rung 0.
        costs: Expected times of rounds.
    """

    def __init__(self, gains: Floats, costs: RoundCosts) -> None:
        self._gains = gains
        self._costs = costs
        self._rows = costs.rows.astype(np.float64)
        self._row_counts: list[int] = costs.rows.tolist()
        self._num_classes, self._num_rungs = gains.shape
        self._nobody = self._num_rungs * self._num_classes
        self._climbs = [self._climb(cap) for cap in range(self._num_rungs)]
        self._climbs_of: dict[tuple[int, ...], _Climbs | None] = {}

    def deal(
        self,
        classes: Ints,
        caps: Ints,
        held: Ints,
        fixed: FixedRounds = NOTHING_FIXED,
        *,
        favour: float = 0.0,
    ) -> Deal:
        """Return the best deal.

        Args:
            classes: [B].
            caps: [B], the highest rung that each request may have.
            held: [B], the rung that each request has now. All requests keep their rungs unless
                another deal brings clearly more.
            favour: Share of the tokens per second that another deal must add (hysteresis).
        """
        options = self.options(classes, caps, fixed)
        return self.choose(options, held, fixed.mixed_per_token, favour=favour)

    def choose(
        self, options: Options, held: Ints, mixed_per_token: float, *, favour: float = 0.0
    ) -> Deal:
        """Return the best deal among the candidates; other args as of `deal` and FixedRounds."""

        classes, fixed = options.classes, options.fixed._replace(mixed_per_token=mixed_per_token)
        kept = np.minimum(held, options.caps)
        best = self._deal_of(classes, kept, fixed)
        least = best.tokens_per_s * (1.0 + favour)
        deals = []
        if best.limit:
            none = np.zeros_like(classes)
            deals.append(Deal(none, 0, self._rate(classes, none, [len(classes)], fixed)))
        for way in options.best(mixed_per_token):
            deals.append(self._deal_of(classes, self._rungs(options, way, held), fixed))
        for deal in deals:
            if deal.tokens_per_s > least:
                least, best = deal.tokens_per_s, deal
        return best

    def _deal_of(self, classes: Ints, rungs: Ints, fixed: FixedRounds) -> Deal:
        counts = np.bincount(rungs).tolist()
        return Deal(rungs, max(len(counts) - 1, 0), self._rate(classes, rungs, counts, fixed))

    def tokens_per_s(self, classes: Ints, rungs: Ints, fixed: FixedRounds = NOTHING_FIXED) -> float:
        """Return expected tokens per second if requests get these rungs."""
        return self._rate(classes, rungs, np.bincount(rungs).tolist(), fixed)

    def num_tokens(self, classes: Ints, rungs: Ints) -> float:
        """Return expected tokens of a round of these requests."""
        return float(np.add.reduce(self._gains[classes, rungs]))

    def _rate(self, classes: Ints, rungs: Ints, counts: list[int], fixed: FixedRounds) -> float:
        """Return expected tokens per second.

        Args:
            counts: Number of requests by rung, up to the highest rung.
        """
        costs, num_requests = self._costs, len(classes)
        tokens = float(num_requests)
        if len(counts) > 1:
            tokens = self.num_tokens(classes, rungs)
        tokens += fixed.num_tokens
        num_rows = sum(map(operator.mul, counts, self._row_counts))
        kind = RoundKind(
            num_requests=num_requests + fixed.num_requests,
            num_rows=float(num_rows) + fixed.num_rows,
            rung=max(len(counts) - 1, fixed.rung),
            num_trees=sum(counts[1:]) + fixed.num_trees,
        )
        forward_s = costs.forward_s(kind.num_rows)
        seconds = costs.round_s(kind, forward_s) + costs.delay_s(kind.rung, kind.num_trees)
        saved_s = forward_s - costs.marginal_s(kind.num_rows)
        return tokens / (seconds + math.expm1(-fixed.mixed_per_token * tokens) * saved_s)

    def options(self, classes: Ints, caps: Ints, fixed: FixedRounds = NOTHING_FIXED) -> Options:
        """Return the candidates; args as of `deal`."""
        costs = self._costs
        base = len(classes) + fixed.num_rows
        sizes, sizes_s = costs.sizes_above(base)
        climbs = self._climbs_up_to(caps) if len(sizes) else None
        if climbs is None:
            return Options(classes, caps, fixed)
        counts = self._count(classes, caps).take(climbs.counted)
        sums = (climbs.each * counts).cumsum(axis=2)
        rows = sums[0]
        rooms = sizes - base
        by_size, size = (rooms < rows[:, -1:]).nonzero()
        room = rooms.take(size)
        gained, trees = _between(sums, by_size, room)
        ends = ((counts > 0) & (rows <= rooms[-1])).ravel().nonzero()[0]
        at_end = sums.reshape(3, -1).take(ends, axis=1)
        used = np.concatenate((room, at_end[0]))
        tokens = len(classes) + fixed.num_tokens + np.concatenate((gained, at_end[1]))
        num_trees = np.concatenate((trees, at_end[2])).astype(np.int64) + fixed.num_trees
        limit = 1 + np.concatenate((by_size, ends // rows.shape[1]))
        num_rows = base + used
        forward_s = np.concatenate((sizes_s.take(size), costs.forwards_s(num_rows[len(size) :])))
        num_all = len(classes) + fixed.num_requests
        rung = np.maximum(limit, fixed.rung)
        draft_s = costs.drafts_s(rung, num_trees, num_all, num_rows)
        return Options(
            classes,
            caps,
            fixed,
            climbs,
            ends=rows,
            num_filled=len(size),
            limit=limit,
            used=used,
            tokens=tokens,
            forward_s=forward_s,
            saved_s=forward_s - costs.marginal_s(num_rows),
            beside_s=costs.host_s(num_all),
            draft_s=draft_s + costs.delays_s(rung, num_trees),
        )

    def _count(self, classes: Ints, caps: Ints) -> Ints:
        """Return numbers of requests, [2 * R * C + 1]: by cap and class; then by class, with at
        least a cap; then 0, for padding.
        """
        counts = np.zeros(2 * self._nobody + 1, dtype=np.int64)
        keys = caps * self._num_classes + classes
        counts[: self._nobody] = np.bincount(keys, minlength=self._nobody)
        by_cap, above = counts[:-1].reshape(2, self._num_rungs, self._num_classes)
        by_cap[::-1].cumsum(axis=0, out=above[::-1])
        return counts

    def _rungs(self, options: Options, way: int, held: Ints) -> Ints:
        """Return the rung of each request in a candidate."""
        climbs, limit = options.climbs, int(options.limit[way])
        assert climbs is not None
        key, rung, ends = climbs.key[limit - 1], climbs.rung[limit - 1], options.ends[limit - 1]
        num_rows = float(options.used[way])
        num_whole = int(ends.searchsorted(num_rows + _ROUNDING, side="right"))
        rung_of = np.zeros(self._nobody + 1, dtype=np.int64)
        rung_of[key[:num_whole]] = rung[:num_whole]  # of a class's climbs the last one counts
        keys = np.minimum(options.caps, limit) * self._num_classes + options.classes
        rungs = rung_of.take(keys)
        left = num_rows - float(ends[num_whole - 1]) + _ROUNDING
        if num_whole < len(ends) and left >= 1.0:  # the next climb, for some requests
            num_more = int(left // climbs.each[0, limit - 1, num_whole])
            alike = np.flatnonzero(keys == key[num_whole])
            order = np.argsort(held[alike] < rung[num_whole], kind="stable")
            rungs[alike[order[:num_more]]] = rung[num_whole]
        return rungs

    def _climbs_up_to(self, caps: Ints) -> _Climbs | None:
        """Return the orders of climbs of requests with these caps; None: there is no climb."""
        present = tuple([cap for cap, count in enumerate(np.bincount(caps).tolist()) if count])
        if present not in self._climbs_of:
            self._climbs_of[present] = self._stacked(present)
        return self._climbs_of[present]

    def _stacked(self, present: Sequence[int]) -> _Climbs | None:
        limits = range(1, 1 + max(present, default=0))
        climbs = [
            _join([self._climbs[cap] for cap in (*(c for c in present if 0 < c < limit), limit)])
            for limit in limits
        ]
        width = 1 + max((len(climb.key) for climb in climbs), default=0)
        if width == 1:
            return None
        shape = (len(climbs), width)
        key, rung = np.full(shape, self._nobody), np.zeros(shape, dtype=np.int64)
        each = np.zeros((3, *shape))
        for row, climb in enumerate(climbs):
            steps = slice(1, 1 + len(climb.key))
            key[row, steps], rung[row, steps], each[:, row, steps] = climb
        is_limited = key // self._num_classes >= np.array(limits)[:, None]
        return _Climbs(key, key + self._nobody * is_limited, rung, each)

    def _climb(self, cap: int) -> _Climb:
        """Return the climbs of requests that may have rungs up to `cap`: from each rung to the one
        with the most additional tokens per additional row.
        """
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


def _between(sums: Floats, row: Ints, used: Floats) -> tuple[Floats, Floats]:
    """Return tokens and trees if so many rows are used; the last climb may be made by only some of
    its requests.

    Args:
        sums: [3, L, I], rows, tokens and trees up to and including each climb.
        row: [P], index into L.
        used: [P], rows.
    """
    apart = _APART * np.arange(sums.shape[1])
    at, rows = used + apart.take(row), (sums[0] + apart[:, None]).ravel()
    trees = np.interp(at, rows, sums[2].ravel())
    return np.interp(at, rows, sums[1].ravel()), np.ceil(trees)


def _join(climbs: Sequence[_Climb]) -> _Climb:
    """Merge several orders of climbs; climbs of one cap and class keep their order."""
    each = np.concatenate([climb.each for climb in climbs], axis=1)
    best_first = np.argsort(-each[1] / each[0], kind="stable")
    return _Climb(
        np.concatenate([climb.key for climb in climbs])[best_first],
        np.concatenate([climb.rung for climb in climbs])[best_first],
        each[:, best_first],
    )
