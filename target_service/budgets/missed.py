"""Weigh what it takes to wake requests that rest against the tokens that their trees would bring.

While a request rests, its draft gets no feature rows. Before the next tree the draft needs all of
them. Missed rows are counted as pairs: rows that were kept, which hosts copy and the draft reads,
and rows that the target has to compute again (a replay). And hosts have work with each request that
wakes, however few rows it has missed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from target_service.budgets.costs import RoundCosts
from target_service.budgets.deal import Deal
from target_service.features import WOKEN_ROWS

Ints = NDArray[np.int64]

# Trees must make up for what waking takes within the time in which every request gets so many
# tokens, or the tokens that it may still get.
_PAID_BACK_AFTER = 128
# The first tree comes so many rounds after the last missed row.
_FIRST_TREE_AFTER = 6
# So many kept rows cost as much as one replayed row; of a request that does not rest fewer missed
# rows than _MANY_MISSED, all of them kept, are not weighed.
_KEPT_PER_REPLAYED, _MANY_MISSED = 5, 16
# What the hosts' work for a request that wakes adds to steps, seconds. When 128 woke that had
# missed 20 rows each, steps beside an H200 took 30 ms longer, all together.
_WAKING_S = 2e-4


def replayed(missed: Ints) -> Ints:
    """Return the cost of missed rows, in replayed rows.

    Args:
        missed: [B, 2], rows that were kept, and rows to compute again.
    """
    return missed[:, 1] + missed[:, 0] // _KEPT_PER_REPLAYED


def has_many(missed: Ints) -> NDArray[np.bool_]:
    """Return, by request, whether its draft has missed so many rows that it counts as resting.

    Args:
        missed: [B, 2], as of `replayed`.
    """
    return (missed[:, 1] > 0) | (missed[:, 0] >= _MANY_MISSED)


def pays_back(
    deal: Deal,
    staying: Deal,
    is_resting: NDArray[np.bool_],
    missed: Ints | None,
    num_left: Ints | None,
    costs: RoundCosts,
) -> bool:
    """Return whether a deal that wakes requests makes up in time for what waking them takes.

    Args:
        deal: The deal in which requests wake.
        staying: The best deal in which requests that rest go on resting.
        is_resting: [B].
        missed: [B, 2], as of `replayed`; None: no rows.
        num_left: [B], tokens that each request may still get; None: not known.
    """
    is_woken = is_resting & (deal.rungs > 0)
    woken = np.zeros((0, 2), dtype=np.int64) if missed is None else missed[deal.rungs > 0]
    lost_s = costs.marginal_s(float(replayed(woken).sum()))
    lost_s += _WAKING_S * float(np.count_nonzero(is_woken))
    num_tokens = float(_PAID_BACK_AFTER)
    if num_left is not None:
        num_tokens = float(np.minimum(num_left, _PAID_BACK_AFTER).mean())
    # A step sends at most WOKEN_ROWS rows, so on average a draft waits for half of these steps.
    num_tokens -= _FIRST_TREE_AFTER + float(woken.sum()) / WOKEN_ROWS / 2
    rounds_s = max(num_tokens, 0.0) * len(deal.rungs) / staying.tokens_per_s
    return deal.tokens_per_s * rounds_s >= staying.tokens_per_s * (rounds_s + lost_s)
