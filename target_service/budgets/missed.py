"""Rows of the target that drafts have missed: what they cost, and whether trees make up for that.

Rows are counted as pairs: those that were kept for the draft, which hosts copy and it reads, and
those that the target has to compute again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from target_service.budgets.costs import RoundCosts
from target_service.budgets.deal import Deal
from target_service.features import WOKEN_ROWS

Ints = NDArray[np.int64]

# A draft gets what it has missed if that pays within the time in which every request gets so many
# tokens, or what it has left ..
_PAID_BACK_AFTER = 64
# .. and trees come so many rounds after its last row.
_FIRST_TREE_AFTER = 6
# So many rows that were kept cost what one does that is computed again; fewer than so many cost
# nothing.
_KEPT_PER_REPLAYED, _MANY_MISSED = 5, 16


def replayed(missed: Ints) -> Ints:
    """Return what missed rows cost, in rows that are computed again.

    Args:
        missed: [B, 2], rows that were kept, and rows to compute again.
    """
    return missed[:, 1] + missed[:, 0] // _KEPT_PER_REPLAYED


def has_many(missed: Ints) -> NDArray[np.bool_]:
    """Return of which requests drafts have missed so much that it counts.

    Args:
        missed: [B, 2], as of `replayed`.
    """
    return (missed[:, 1] > 0) | (missed[:, 0] >= _MANY_MISSED)


def pays_back(
    deal: Deal, staying: Deal, missed: Ints, num_left: Ints | None, costs: RoundCosts
) -> bool:
    """Return whether a deal brings so much more than one in which no draft gets what it has missed
    that within some rounds it makes up for that.

    Args:
        staying: The other deal.
        missed: [B, 2], as of `replayed`.
        num_left: [B], tokens that each request may have yet; None: not known.
    """
    woken = missed[deal.rungs > 0]
    lost_s = costs.marginal_s(float(replayed(woken).sum()))
    num_tokens = float(_PAID_BACK_AFTER)
    if num_left is not None:
        num_tokens = float(np.minimum(num_left, _PAID_BACK_AFTER).mean())
    # Drafts get so many rows with each round: on average after half of these rounds.
    num_tokens -= _FIRST_TREE_AFTER + float(woken.sum()) / WOKEN_ROWS / 2
    rounds_s = max(num_tokens, 0.0) * len(deal.rungs) / staying.tokens_per_s
    return deal.tokens_per_s * rounds_s >= staying.tokens_per_s * (rounds_s + lost_s)
