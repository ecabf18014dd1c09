"""What the rows of one step attend to, and how a layer does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shared.kernels.fp8_cache import UNSCALED, KVScales


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAttentionMetadata:
    """Which K/V every row of a step sees; one object per forward, shared by its layers.

    A row sees the prefix (logical slots [0, prefix_len), KV index = slot) and its own path: path
    token m at KV index prefix_len + m, logical slot prefix_len + offset of m.

    Args:
        page_table: [max_reqs, max_pages_per_req] i32 page ids.
        req_idx: [R] i32. Row of page_table.
        prefix_len: [R] i32. Committed tokens that all rows of the request see.
        row_indptr: [R + 1] i32. Rows of a request are contiguous; rows past the last are padding.
        path_len: [T] i32. Tokens of this block on the row's own path, itself included, >= 1.
        path_offset: [T, D] i32. Offset from prefix_len of path token m < path_len, in position
            order, the row itself last. Not read for chains, where the offset of m is m.
        is_chain: [R] bool.
        page_size: Slots per page.
        window: 0 = none; a row at KV index i sees j with i - j < window.
        has_trees: False: every request is a chain; a GPU then need not look for others.
        most_rows: Rows that no request has more than; 0: not known.
        plans: What was derived from all this for one layer, for the next ones; whoever changes a
            tensor above needs a new object.
    """

    page_table: torch.Tensor
    req_idx: torch.Tensor
    prefix_len: torch.Tensor
    row_indptr: torch.Tensor
    path_len: torch.Tensor
    path_offset: torch.Tensor
    is_chain: torch.Tensor
    page_size: int
    window: int = 0
    has_trees: bool = True
    most_rows: int = 0
    plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """What one layer has of its own.

    Args:
        scale: Multiplies the scores.
        sinks: [Hq] f32, of each head a score without a V, which all rows see; None: there are none.
        softcap: Scores s become softcap * tanh(s / softcap); 0: they stay.
        kv_scales: Of caches in FP8.
    """

    scale: float
    sinks: torch.Tensor | None = None
    softcap: float = 0.0
    kv_scales: KVScales = UNSCALED
