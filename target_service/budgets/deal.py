"""Divide the rows of a step among requests, so that a round brings the most tokens per second.

The tokens of a round are counted as the number of requests times the geometric mean of what they
expect each: 10% more tokens for one request weigh as much as 10% more for another, whatever their
texts. With the sum instead, rows go to the texts that are easily guessed, the others run on alone
at the end of a batch, and under arrivals they are the slow tail.

The time of a round has three parts: the forward of its rows, the hosts' work, and the growth of its
trees, which depends on their number and on the largest rung among them alone. So the search runs
once for each largest rung:

1. Every request starts with its root.
2. Climbs (a climb takes one request from one rung to a higher one) are taken in order of what they
   add to the logarithm of the request's expected tokens, per row, over all requests, until the rows
   of a step are used up.
3. Each prefix of this order is a candidate; the best candidate of all largest rungs is taken.

The climbs of one request are in the right order by themselves: a climb that adds less per row than
it would together with the next climb is merged into that one, so that what is added per row falls
along a request's climbs.

Requests of the same class (expected acceptance) and the same cap (highest rung) are alike, so the
search runs on counts per class and cap. The order of climbs depends on the gains alone and is
computed once; one decision evaluates the candidates of all largest rungs as arrays. These are
small: what a decision takes is the number of calls of NumPy, whose code other work drives out of
the CPU's caches between two decisions.

Sources: greedy allocation by marginal utility, as in DSpark's scheduler and arXiv:2406.14066;
logarithms as utilities are proportional fairness (Kelly, Maulloo and Tan 1998).

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
        tokens_per_s: Expected tokens per second of all requests together, fairly counted (see the
            module).
    """

    rungs: Ints
    limit: int
    tokens_per_s: float


class _Division(NamedTuple):
    """The rung of each request, and what its rate depends on.

    Args:
        rungs: [B], 0: the root alone.
        counts: Number of requests by rung, up to the highest rung of these.
        num_tokens: Expected tokens of a round of these requests, fairly counted.
    """

    rungs: Ints
    counts: list[int]
    num_tokens: float


class _Climb(NamedTuple):
    """The climbs of requests of one cap, or of several caps; fields as of _Climbs, one row, but
    keys are cap * C + class.
    """

    key: Ints
    rung: Ints
    each: Floats


class _Climbs(NamedTuple):
    """The orders of climbs, [L, I] each. Row `limit - 1` has the climbs if no rung above `limit` is
    allowed, those that add the most per row first. The first entry of a row, and the entries
    after its last climb, are padding and belong to no request.

    Args:
        key: Which requests make the climb: those with a key in the row (`Dealer._keys`); padding:
            the last key of the row, which no request has.
        rung: The rung that the climb leads to.
        each: [3, L, I], per request: additional rows; what the climb adds to the logarithm of its
            expected tokens; 1 if the request had the root alone before the climb, else 0.
        apart: [L, 1], the shift of each row, see _APART.
    """

    key: Ints
    rung: Ints
    each: Floats
    apart: Floats


class Options(NamedTuple):
    """The candidates for a deal, P ways to divide rows: by the largest rung and the rows used.

    Args:
        classes: [B].
        held: [B], the rung that each request has now.
        kept: The division in which all requests keep their rungs.
        fixed: Requests whose trees are not chosen.
        divided: By candidate: its division, once it was computed.
        climbs: The orders of climbs; None: no request can have a tree, and there is no candidate.
        keys: [R - 1, B], the key of each request by the largest rung, see `Dealer._keys`.
        ends: [L, I], rows of all climbs up to and including each.
        num_filled: The first `num_filled` candidates fill a captured size of a step exactly. The
            others end where all requests of a class and cap have made a climb.
        limit: [P], the largest rung of each candidate.
        used: [P], rows beside roots and the rows of `fixed`.
        tokens: [P], expected tokens of a round of all requests, fairly counted.
        num_rows: [P], rows of the step.
        forward_s: [P], time of the forward if the step has no rows of prompts.
        beside_s: Time of the hosts' work.
        draft_s: [P], time of the trees.
    """

    classes: Ints
    held: Ints
    kept: _Division
    fixed: FixedRounds
    divided: dict[int, _Division]
    climbs: _Climbs | None = None
    keys: Ints = _NOBODY
    ends: Floats = _NONE
    num_filled: int = 0
    limit: Ints = _NOBODY
    used: Floats = _NONE
    tokens: Floats = _NONE
    num_rows: Ints = _NOBODY
    forward_s: Floats = _NONE
    beside_s: float = 0.0
    draft_s: Floats = _NONE


class Dealer:
    """Finds the best deal, given one table of gains.

    Args:
        gains: [C, R], expected tokens of a round by class and rung; 1 at rung 0.
        costs: Expected times of rounds.
    """

    def __init__(self, gains: Floats, costs: RoundCosts) -> None:
        self._utilities: Floats = np.log(gains)  # [C, R]
        self._costs = costs
        self._rows = costs.rows.astype(np.float64)
        self._row_counts: list[int] = costs.rows.tolist()
        self._num_classes, num_rungs = gains.shape
        # Requests whose highest rung is `cap` have, if no rung above `limit` is allowed, the key
        # (limit - 1) * num_keys + min(cap, limit) * C + class. Here by limit and cap: the key of
        # class 0, [R - 1, R].
        self._num_keys = num_rungs * self._num_classes + 1  # the last one is nobody's
        limits, caps = np.arange(1, num_rungs)[:, None], np.arange(num_rungs)
        first_keys = (limits - 1) * self._num_keys + np.minimum(caps, limits) * self._num_classes
        self._first_keys: Ints = first_keys
        self._num_all_keys = len(first_keys) * self._num_keys
        self._climbs = [self._climb(cap) for cap in range(num_rungs)]
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
        return self.choose(self.options(classes, caps, held, fixed), fixed, favour=favour)

    def choose(self, options: Options, fixed: FixedRounds, *, favour: float = 0.0) -> Deal:
        """Return the best deal among the candidates.

        Args:
            fixed: Those of the options; only how often prompts come may be another one.
            favour: As of `deal`.
        """
        best = self._deal_of(options.kept, fixed)
        least = best.tokens_per_s * (1.0 + favour)
        deals = [self.rest(len(options.classes), fixed)] if best.limit else []
        for way in self._best(options, fixed.mixed_per_token):
            if way not in options.divided:
                rungs = self._rungs(options, way)
                options.divided[way] = self._divided(options.classes, rungs)
            deals.append(self._deal_of(options.divided[way], fixed))
        for deal in deals:
            if deal.tokens_per_s > least:
                least, best = deal.tokens_per_s, deal
        return best

    def rest(self, num_requests: int, fixed: FixedRounds) -> Deal:
        """Return the deal in which no request has a tree."""
        rungs = np.zeros(num_requests, dtype=np.int64)
        return self._deal_of(_Division(rungs, [num_requests], float(num_requests)), fixed)

    def tokens_per_s(self, classes: Ints, rungs: Ints, fixed: FixedRounds = NOTHING_FIXED) -> float:
        """Return expected tokens per second if requests get these rungs."""
        return self._deal_of(self._divided(classes, rungs), fixed).tokens_per_s

    def num_tokens(self, classes: Ints, rungs: Ints) -> float:
        """Return expected tokens of a round of these requests, fairly counted."""
        num_requests = len(classes)
        total = float(np.add.reduce(self._utilities[classes, rungs]))
        return num_requests * math.exp(total / num_requests) if num_requests else 0.0

    def _divided(self, classes: Ints, rungs: Ints) -> _Division:
        counts = np.bincount(rungs).tolist()
        has_trees = len(counts) > 1
        tokens = self.num_tokens(classes, rungs) if has_trees else float(len(classes))
        return _Division(rungs, counts, tokens)

    def _deal_of(self, division: _Division, fixed: FixedRounds) -> Deal:
        costs, (rungs, counts, tokens) = self._costs, division
        limit = max(len(counts) - 1, 0)
        tokens += fixed.num_tokens
        num_rows = sum(map(operator.mul, counts, self._row_counts))
        kind = RoundKind(
            num_requests=len(rungs) + fixed.num_requests,
            num_rows=float(num_rows) + fixed.num_rows,
            rung=max(limit, fixed.rung),
            num_trees=sum(counts[1:]) + fixed.num_trees,
        )
        forward_s = costs.forward_s(kind.num_rows)
        seconds = costs.round_s(kind, forward_s) + costs.delay_s(kind.rung, kind.num_trees)
        if fixed.mixed_per_token:
            saved_s = forward_s - costs.marginal_s(kind.num_rows)
            seconds += math.expm1(-fixed.mixed_per_token * tokens) * saved_s
        return Deal(rungs, limit, tokens / seconds)

    def _best(self, options: Options, mixed_per_token: float) -> list[int]:
        """Return the best candidate that fills a captured size, and the best of the others.

        Args:
            mixed_per_token: As of FixedRounds.
        """
        forward_s = options.forward_s
        if mixed_per_token:
            # The padding is filled with rows that would have to be computed in another step.
            saved_s = forward_s - self._costs.marginal_s(options.num_rows.astype(np.float64))
            forward_s = forward_s + np.expm1(-mixed_per_token * options.tokens) * saved_s
        scores = options.tokens / (forward_s + options.beside_s + options.draft_s)
        split = options.num_filled
        ways = [int(scores[:split].argmax())] if split else []
        return [*ways, split + int(scores[split:].argmax())] if split < len(scores) else ways

    def options(
        self, classes: Ints, caps: Ints, held: Ints, fixed: FixedRounds = NOTHING_FIXED
    ) -> Options:
        """Return the candidates; args as of `deal`."""
        costs = self._costs
        kept = self._divided(classes, np.minimum(held, caps))
        base = len(classes) + fixed.num_rows
        sizes = costs.sizes_above(base)
        climbs = self._climbs_up_to(caps) if len(sizes) else None
        if climbs is None:
            return Options(classes, held, kept, fixed, {})
        keys = self._keys(classes, caps)
        counts = np.bincount(keys.ravel(), minlength=self._num_all_keys)
        counts = counts.take(climbs.key)
        sums = (climbs.each * counts).cumsum(axis=2)
        rows = sums[0]
        rooms = sizes - base
        by_size, size = (rooms < rows[:, -1:]).nonzero()
        filled = _between(sums, climbs.apart, by_size, rooms.take(size))
        ends = ((counts > 0) & (rows <= rooms[-1])).ravel().nonzero()[0]
        at_end = sums.reshape(3, -1).take(ends, axis=1)
        used, utilities, trees = np.concatenate((filled, at_end), axis=1)
        num_trees = trees.astype(np.int64) + fixed.num_trees
        limit = np.concatenate((by_size, ends // rows.shape[1])) + 1
        num_rows = used.astype(np.int64) + base
        num_all = len(classes) + fixed.num_requests
        rung = np.maximum(limit, fixed.rung) if fixed.rung else limit
        draft_s = costs.drafts_s(rung, num_trees, num_all, num_rows)
        if costs.num_targets > 1:
            draft_s += costs.delays_s(rung, num_trees)
        return Options(
            classes,
            held,
            kept,
            fixed,
            {},
            climbs,
            keys,
            ends=rows,
            num_filled=len(size),
            limit=limit,
            used=used,
            tokens=np.exp(utilities / len(classes)) * len(classes) + fixed.num_tokens,
            num_rows=num_rows,
            forward_s=costs.forwards_s(num_rows),
            beside_s=costs.host_s(num_all),
            draft_s=draft_s,
        )

    def _keys(self, classes: Ints, caps: Ints) -> Ints:
        """Return the keys of requests, [R - 1, B]: row `limit - 1` says which of them are alike if
        no rung above `limit` is allowed. Different rows have different keys.
        """
        return self._first_keys.take(caps, axis=1) + classes

    def _rungs(self, options: Options, way: int) -> Ints:
        """Return the rung of each request in a candidate."""
        climbs, row = options.climbs, int(options.limit[way]) - 1
        assert climbs is not None
        key, rung, ends = climbs.key[row], climbs.rung[row], options.ends[row]
        num_rows = float(options.used[way])
        num_whole = int(ends.searchsorted(num_rows + _ROUNDING, side="right"))
        rung_of = np.zeros(self._num_all_keys, dtype=np.int64)
        rung_of[key[:num_whole]] = rung[:num_whole]  # of a class's climbs the last one counts
        keys = options.keys[row]
        rungs = rung_of.take(keys)
        left = num_rows - float(ends[num_whole - 1]) + _ROUNDING
        if num_whole < len(ends) and left >= 1.0:  # the next climb, for some requests
            num_more = int(left // climbs.each[0, row, num_whole])
            alike = (keys == key[num_whole]).nonzero()[0]
            order = (options.held.take(alike) < rung[num_whole]).argsort(kind="stable")
            rungs[alike.take(order[:num_more])] = rung[num_whole]
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
        first = self._num_keys * np.arange(len(climbs))[:, None]
        key, rung = np.full(shape, self._num_keys - 1) + first, np.zeros(shape, dtype=np.int64)
        each = np.zeros((3, *shape))
        for row, climb in enumerate(climbs):
            steps = slice(1, 1 + len(climb.key))
            key[row, steps] = climb.key + first[row]
            rung[row, steps], each[:, row, steps] = climb.rung, climb.each
        apart = np.arange(len(climbs), dtype=np.float64)[:, None] * _APART
        return _Climbs(key, rung, each, apart)

    def _climb(self, cap: int) -> _Climb:
        """Return the climbs of requests that may have rungs up to `cap`: from each rung to the one
        that adds the most utility per additional row.
        """
        utilities, rows = self._utilities[:, : cap + 1], self._rows[: cap + 1]
        classes = np.arange(self._num_classes)
        at = np.zeros(self._num_classes, dtype=np.int64)
        parts = [_Climb(at[:0], at[:0], np.zeros((3, 0)))]
        for _ in range(cap):
            more_rows = rows - rows[at, None]
            more = utilities - utilities[classes, at][:, None]
            slope = np.where(more_rows > 0, more / np.maximum(more_rows, 1.0), 0.0)
            to = slope.argmax(axis=1)
            going = np.flatnonzero(slope[classes, to] > 0)
            to = to[going]
            key = cap * self._num_classes + going
            before = at[going]
            added = utilities[going, to] - utilities[going, before]
            each = np.array([rows[to] - rows[before], added, before == 0], dtype=np.float64)
            parts.append(_Climb(key, to, each))
            at[going] = to
        return _join(parts)


def _between(sums: Floats, apart: Floats, row: Ints, used: Floats) -> Floats:
    """Return rows, utilities and trees, [3, P], if so many rows are used; the last climb may be
    made by only some of its requests.

    Args:
        sums: [3, L, I], rows, utilities and trees up to and including each climb.
        apart: As of _Climbs.
        row: [P], index into L.
        used: [P], rows.
    """
    at, rows = used + apart.take(row), (sums[0] + apart).ravel()
    utilities, trees = np.interp(at, rows, sums[1].ravel()), np.interp(at, rows, sums[2].ravel())
    return np.array((used, utilities, np.ceil(trees)))


def _join(climbs: Sequence[_Climb]) -> _Climb:
    """Merge several orders of climbs; climbs of one cap and class keep their order."""
    each = np.concatenate([climb.each for climb in climbs], axis=1)
    best_first = np.argsort(-each[1] / each[0], kind="stable")
    return _Climb(
        np.concatenate([climb.key for climb in climbs])[best_first],
        np.concatenate([climb.rung for climb in climbs])[best_first],
        each[:, best_first],
    )
