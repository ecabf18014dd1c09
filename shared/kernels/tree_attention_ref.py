"""Tree attention in plain torch: the reference of the kernel, and what CPU servers run.

Exact by construction. KV tiles are cut at multiples of KV index; every (row, KV head, tile) is one
item of a batched product, [group, d] x [d, TILE] and [group, TILE] x [TILE, d], whose bits depend
on nothing but its operands; a row's tiles are added in ascending order. Where the operands of an
item come from is free: tiles that all rows of a request share are gathered once, the tiles that
hold a row's own path once per row.
"""

from __future__ import annotations

import math

import torch

from shared.kernels.tree_attention_metadata import TreeAttentionMetadata
from shared.kernels.tree_attention_plan import plan_rows
from shared.kernels.tree_attention_workspace import Workspace, make_workspaces
from shared.kernels.vector_math import settle_vector_math

_LOG2_E = math.log2(math.e)


def tree_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: TreeAttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Do what `tree_attention` does in plain torch."""
    settle_vector_math()
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    shape = (num_kv_heads, num_heads // num_kv_heads, head_dim)
    key = (shape, q.device)
    spaces = metadata.plans.get(key)
    if spaces is None:
        slices = plan_rows(metadata, num_heads, num_kv_heads, head_dim, q.device)
        metadata.plans[key] = spaces = make_workspaces(slices, shape, q.device)
    # Weights are powers of 2: exp is several times slower where the result vanishes.
    scaled = (q.float() * (scale * _LOG2_E)).view(num_rows, *shape)
    out = torch.zeros_like(scaled)
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    for space in spaces:
        where = space.rows.where
        acc = out[where]  # a view of adjacent rows, else a copy
        _attend(scaled[where], keys, values, space, acc)
        if isinstance(where, torch.Tensor):
            out.index_copy_(0, where, acc)
    return out.view(q.shape).to(q.dtype)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    space: Workspace,
    acc: torch.Tensor,
) -> None:
    """Attend from the rows of a slice.

    Args:
        q: [n, Hkv, group, d], scaled.
        keys: [num_slots * Hkv, d].
        values: [num_slots * Hkv, d].
        acc: [n, Hkv, group, d] of 0.
    Mutates: `acc`; the workspace.
    """
    num_own = space.rows.num_own
    _gather(keys, space.rows.index, space.k)
    _gather(values, space.rows.index, space.v)

    for head, tiles in enumerate(space.shared):
        head_q = q[:, head]
        for tile in tiles:
            torch.bmm(head_q, tile.k, out=tile.scores)
    if num_own:
        own_q = q.expand(num_own, *q.shape).reshape(-1, *q.shape[2:])
        torch.bmm(own_q, space.own_k, out=space.own_scores)

    totals = _softmax(space)

    for head, tiles in enumerate(space.shared):
        head_acc = acc[:, head]
        for tile in tiles:
            head_acc += torch.bmm(tile.scores, tile.v, out=space.product)
    if num_own:
        torch.bmm(space.own_scores, space.own_v, out=space.own_products)
        for product in space.own_product_tiles:
            acc += product
    acc /= totals.view(*acc.shape[:3], 1)


def _gather(cache: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the rows `index` of a cache to `out`, in float32."""
    if cache.dtype == out.dtype:
        torch.index_select(cache, 0, index, out=out)
    else:
        out.copy_(cache.index_select(0, index))


def _softmax(space: Workspace) -> torch.Tensor:
    """Turn scores into weights and return their sums per row, [n, H], tiles added in order.

    torch computes 2^x by vectors and the rest of a range by a scalar function of other bits. There
    is never a rest: tiles are wider than vectors, and chunks too short to be cut for threads.

    Mutates: the scores of the workspace.
    """
    if len(space.masked_scores):
        space.masked_scores.add_(space.rows.mask)
    scores = space.scores
    largest = scores.amax(-1)  # [tiles, n, H]
    scores.sub_(largest.amax(0).unsqueeze(-1))
    for chunk in space.score_chunks:
        chunk.exp2_()
    sums = scores.sum(-1)
    return sums.cumsum(0, dtype=torch.float64)[-1].to(sums.dtype)
