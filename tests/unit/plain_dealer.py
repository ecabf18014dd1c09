"""How requests are dealt rungs, one largest rung after another: what a Dealer must deal as well."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from target_service.budgets.costs import RoundCosts, RoundKind
from target_service.budgets.deal import Deal, FixedRounds

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_ROUNDING = 1e-6


class _Step(NamedTuple):
    """A step up the ladder of all requests of a cap and a class."""

    cap: int
    of_class: int
    rung: int
    rows: float
    utility: float
    is_first: bool


class PlainDealer:
    """Deals by one table of gains; args as of Dealer."""

    def __init__(self, gains: Floats, costs: RoundCosts) -> None:
        self._utilities, self._costs = np.log(gains), costs
        self._rows = costs.rows.astype(np.float64)

    def deal(
        self, classes: Ints, caps: Ints, held: Ints, fixed: FixedRounds, *, favour: float
    ) -> Deal:
        """Return what requests get; args as of `Dealer.deal`."""
        best = self._deal_of(classes, np.minimum(held, caps), fixed)
        least = best.tokens_per_s * (1.0 + favour)
        filled: list[tuple[float, Ints]] = []
        whole: list[tuple[float, Ints]] = []
        for limit in range(1, 1 + int(caps.max())):
            self._add_plans(filled, whole, limit, classes, caps, held, fixed)
        plans = [max(plans, key=lambda plan: plan[0])[1] for plans in (filled, whole) if plans]
        for rungs in (np.zeros_like(classes), *plans):
            deal = self._deal_of(classes, rungs, fixed)
            if deal.tokens_per_s > least:
                least, best = deal.tokens_per_s, deal
        return best

    def _deal_of(self, classes: Ints, rungs: Ints, fixed: FixedRounds) -> Deal:
        costs, limit = self._costs, int(rungs.max())
        mean = float(np.exp(self._utilities[classes, rungs].mean()))
        tokens = len(classes) * mean + fixed.num_tokens
        kind = RoundKind(
            num_requests=len(classes) + fixed.num_requests,
            num_rows=float(self._rows[rungs].sum()) + fixed.num_rows,
            rung=max(limit, fixed.rung),
            num_trees=int(np.count_nonzero(rungs)) + fixed.num_trees,
        )
        seconds = costs.round_s(kind) + costs.delay_s(kind.rung, kind.num_trees)
        saved_s = costs.forward_s(kind.num_rows) - costs.marginal_s(kind.num_rows)
        mixed = 1.0 - math.exp(-fixed.mixed_per_token * tokens)
        rate = tokens / (seconds - mixed * saved_s)
        return Deal(rungs, limit, rate)

    def _add_plans(
        self,
        filled: list[tuple[float, Ints]],
        whole: list[tuple[float, Ints]],
        limit: int,
        classes: Ints,
        caps: Ints,
        held: Ints,
        fixed: FixedRounds,
    ) -> None:
        """Add the best plan that fills a step, and the best by which all get what they may.

        Args:
            limit: Rung that no request is above.
        """
        costs, base = self._costs, len(classes) + fixed.num_rows
        sizes = costs.sizes_above(base)
        limited = np.minimum(caps, limit)
        steps = self._steps(sorted(set(limited.tolist())))
        counts = [
            np.count_nonzero((limited == step.cap) & (classes == step.of_class)) for step in steps
        ]
        ends = np.cumsum([0.0, *(n * s.rows for n, s in zip(counts, steps, strict=True))])
        added = np.cumsum([0.0, *(n * s.utility for n, s in zip(counts, steps, strict=True))])
        trees = np.cumsum([0.0, *(n * s.is_first for n, s in zip(counts, steps, strict=True))])
        rooms = [room for room in sizes - base if room < ends[-1]]
        lasts = [
            end for end, n in zip(ends[1:], counts, strict=True) if n and end + base <= sizes[-1]
        ]
        for plans, used in ((filled, rooms), (whole, lasts)):
            scores = []
            for num_rows in used:
                mean = math.exp(float(np.interp(num_rows, ends, added)) / len(classes))
                tokens = len(classes) * mean + fixed.num_tokens
                num_trees = int(np.ceil(np.interp(num_rows, ends, trees))) + fixed.num_trees
                kind = RoundKind(
                    num_requests=len(classes) + fixed.num_requests,
                    num_rows=base + num_rows,
                    rung=max(limit, fixed.rung),
                    num_trees=num_trees,
                )
                forward_s = costs.forward_s(kind.num_rows)
                saved_s = forward_s - costs.marginal_s(kind.num_rows)
                seconds = costs.round_s(kind) + costs.delay_s(kind.rung, num_trees)
                seconds -= (1.0 - math.exp(-fixed.mixed_per_token * tokens)) * saved_s
                scores.append(tokens / seconds)
            if scores:
                place = int(np.argmax(scores))
                rungs = self._rungs(steps, ends, used[place], classes, limited, held)
                plans.append((scores[place], rungs))

    def _steps(self, caps: list[int]) -> list[_Step]:
        """Return the steps of requests with these caps, those that add the most per row first.

        Of alike ones first those of lower caps, then those that begin lower, then harder classes.
        """
        steps = []
        for cap in caps:
            of_cap = []
            for of_class, utilities in enumerate(self._utilities):
                at, turn = 0, 0
                while at < cap:
                    slopes = (utilities[at + 1 : cap + 1] - utilities[at]) / (
                        self._rows[at + 1 : cap + 1] - self._rows[at]
                    )
                    if slopes.max() <= 0:
                        break
                    to = at + 1 + int(slopes.argmax())
                    rows, added = self._rows[to] - self._rows[at], utilities[to] - utilities[at]
                    of_cap.append((turn, _Step(cap, of_class, to, rows, added, at == 0)))
                    at, turn = to, turn + 1
            steps += [step for _, step in sorted(of_cap, key=lambda one: one[0])]
        return sorted(steps, key=lambda step: -step.utility / step.rows)

    def _rungs(
        self,
        steps: list[_Step],
        ends: Floats,
        num_rows: float,
        classes: Ints,
        limited: Ints,
        held: Ints,
    ) -> Ints:
        """Return the rung of each request where so many rows are used."""
        rungs = np.zeros_like(classes)
        for step, begin, end in zip(steps, ends, ends[1:], strict=False):
            alike = np.flatnonzero((limited == step.cap) & (classes == step.of_class))
            if end > num_rows + _ROUNDING:
                first = np.argsort(held[alike] < step.rung, kind="stable")
                alike = alike[first[: int((num_rows - begin + _ROUNDING) // step.rows)]]
            rungs[alike] = step.rung
            if end > num_rows + _ROUNDING:
                break
        return rungs
