"""Tree attention on a CPU.

Exact by construction. KV tiles are cut at multiples of KV index; every (row, KV head, tile) is one
item of a batched product, [group, d] x [d, TILE] and [group, TILE] x [TILE, d]; a row's tiles are
added in ascending order. Where the operands of an item come from is free: tiles that all rows of a
request share are gathered once, the tiles that hold a row's own path once per row. Items are
aligned, padded copies, and batches have one size, so that whoever multiplies them always sees the
same call (see products_cpu.py).
"""

from __future__ import annotations

import math

import torch

from shared.kernels.products_cpu import BatchLibrary, CpuProducts
from shared.kernels.tree_attention_metadata import TreeAttentionMetadata
from shared.kernels.tree_attention_plan import plan_rows
from shared.kernels.tree_attention_workspace import Workspace, make_workspaces, multiply
from shared.kernels.vector_math import settle_vector_math

_LOG2_E = math.log2(math.e)


def tree_attention_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: TreeAttentionMetadata,
    scale: float,
    *,
    products: CpuProducts | None = None,
) -> torch.Tensor:
    """Do what `tree_attention` does, on a CPU."""
    settle_vector_math()
    library = (products or CpuProducts()).attention
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
        rows = _attend(scaled[where], keys, values, space, library)
        if isinstance(where, torch.Tensor):
            out.index_copy_(0, where, rows)
        else:
            out[where] = rows
    return out.view(q.shape).to(q.dtype)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    space: Workspace,
    library: BatchLibrary,
) -> torch.Tensor:
    """Attend from the rows of a slice.

    Args:
        q: [n, Hkv, group, d], scaled.
        keys: [num_slots * Hkv, d].
        values: [num_slots * Hkv, d].
    Returns: [n, Hkv, group, d], a view of the workspace.
    Mutates: the workspace.
    """
    num_rows, _, group, head_dim = q.shape
    q = q.transpose(0, 1)
    if q.shape != space.q.shape:
        space.q.zero_()
    space.q[:, :num_rows, :group, :head_dim] = q
    if space.rows.num_own > 1:
        space.own_q.copy_(space.q.expand_as(space.own_q))
    _gather(keys, space.rows.index, space.k)
    _gather(values, space.rows.index, space.v)

    multiply(library, space.score_batches)
    totals = _softmax(space)

    space.acc.zero_()
    for batches in space.shared_batches:
        multiply(library, batches)
        space.acc.add_(space.product)
    multiply(library, space.own_batches)
    for product in space.own_products:
        space.acc.add_(product)
    space.acc.div_(totals.unsqueeze(-1))
    return space.acc[:, :num_rows, :group, :head_dim].transpose(0, 1)


def _gather(cache: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the rows `index` of a cache to `out`, in float32, and zeros beside them."""
    head_dim = cache.shape[1]
    if cache.dtype == out.dtype and head_dim == out.shape[1]:
        torch.index_select(cache, 0, index, out=out)
        return
    if head_dim < out.shape[1]:
        out[:, head_dim:].zero_()
    out[:, :head_dim] = cache.index_select(0, index)


def _softmax(space: Workspace) -> torch.Tensor:
    """Turn scores into weights and return their sums, [Hkv, n, G], tiles added in order.

    torch computes 2^x by vectors and the rest of a range by a scalar function of other bits. There
    is never a rest: tiles are wider than vectors, and chunks too short to be cut for threads.

    Mutates: the scores of the workspace.
    """
    if len(space.masked_scores):
        space.masked_scores.add_(space.rows.mask)
    scores = space.scores
    largest = scores.amax(-1)  # [tiles, Hkv, n, G]
    scores.sub_(largest.amax(0).unsqueeze(-1))
    for chunk in space.score_chunks:
        chunk.exp2_()
    sums = scores.sum(-1)
    return sums.cumsum(0, dtype=torch.float64)[-1].to(sums.dtype)
