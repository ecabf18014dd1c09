"""Tree attention on a CPU.

Exact by construction. KV tiles are cut at multiples of KV index; every (row, KV head, tile) is one
item of a batched product, [group, d] x [d, TILE] and [group, TILE] x [TILE, dv]; a row's tiles are
added in ascending order. Where the operands of an item come from is free: tiles that all rows of a
request share are gathered once, the tiles that hold a row's own path once per row. Items are
aligned, padded copies, and batches have one size, so that whoever multiplies them always sees the
same call (see products_cpu.py).
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from shared.kernels.fp8_cache import as_bytes, is_fp8
from shared.kernels.products_cpu import GROUP_MULTIPLE, BatchLibrary, CpuProducts, padded
from shared.kernels.tree_attention_metadata import AttentionParams, TreeAttentionMetadata
from shared.kernels.tree_attention_plan import CPU_KV_TILE, plan_rows
from shared.kernels.tree_attention_workspace import (
    ELEMENTWISE_CHUNK,
    Workspace,
    make_workspaces,
    multiply,
)
from shared.kernels.vector_math import settle_vector_math

_LOG2_E = math.log2(math.e)


def tree_attention_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: TreeAttentionMetadata,
    params: AttentionParams,
    *,
    products: CpuProducts | None = None,
) -> torch.Tensor:
    """Do what `tree_attention` does, on a CPU."""
    settle_vector_math()
    library = (products or CpuProducts()).attention
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, v_dim = v_cache.shape[1:]
    shape = (num_kv_heads, num_heads // num_kv_heads, head_dim, v_dim)
    key = (shape, q.device)
    spaces = metadata.plans.get(key)
    if spaces is None:
        slices = plan_rows(metadata, num_heads, num_kv_heads, head_dim, q.device)
        metadata.plans[key] = spaces = make_workspaces(slices, shape, q.device)
    scale, softcap, sinks, v_scale = params.scale, params.softcap, params.sinks, 1.0
    if is_fp8(k_cache):
        scale, v_scale = scale * params.kv_scales.k, params.kv_scales.v
    # Weights are powers of 2: exp is several times slower where the result vanishes.
    factor = scale * _LOG2_E * (2 / softcap if softcap else 1)
    scaled = (q.float() * factor).view(num_rows, *shape[:3])
    if sinks is not None:
        sinks = _padded_sinks(sinks * _LOG2_E, num_kv_heads)
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    if len(spaces) == 1 and _are_all(spaces[0].rows.where, num_rows):
        out = torch.empty((*scaled.shape[:3], v_dim), dtype=q.dtype, device=q.device)
        rows = _attend(scaled, keys, values, sinks, spaces[0], library, softcap, v_scale)
        return out.copy_(rows).view(num_rows, num_heads, v_dim)
    out = scaled.new_zeros((*scaled.shape[:3], v_dim))
    for space in spaces:
        where = space.rows.where
        rows = _attend(scaled[where], keys, values, sinks, space, library, softcap, v_scale)
        if isinstance(where, torch.Tensor):
            out.index_copy_(0, where, rows)
        else:
            out[where] = rows
    return out.view(num_rows, num_heads, v_dim).to(q.dtype)


def _are_all(where: slice | torch.Tensor, num_rows: int) -> bool:
    """Return whether these are all rows of a step, in order."""
    return isinstance(where, slice) and where == slice(0, num_rows)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
    space: Workspace,
    library: BatchLibrary,
    softcap: float,
    v_scale: float,
) -> torch.Tensor:
    """Attend from the rows of a slice.

    Args:
        q: [n, Hkv, group, d], scaled; under a cap, twice what tanh is to take.
        keys: [num_slots * Hkv, d].
        values: [num_slots * Hkv, dv].
        sinks: [Hkv, 1, G, 1], scaled as scores are; None: there are none.
        v_scale: Of the values.
    Returns: [n, Hkv, group, dv], a view of the workspace.
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
    if softcap:
        _cap(space, softcap * _LOG2_E)
    totals = _softmax(space, sinks)

    space.acc.zero_()
    for batches in space.shared_batches:
        multiply(library, batches)
        space.acc.add_(space.product)
    multiply(library, space.own_batches)
    for product in space.own_products:
        space.acc.add_(product)
    space.acc.div_(totals.unsqueeze(-1))
    if v_scale != 1:
        space.acc.mul_(v_scale)
    return space.acc[:, :num_rows, :group, : values.shape[1]].transpose(0, 1)


def _gather(cache: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the rows `index` of a cache to `out`, in float32, and zeros beside them."""
    head_dim = cache.shape[1]
    if cache.dtype == out.dtype and head_dim == out.shape[1]:
        torch.index_select(cache, 0, index, out=out)
        return
    if head_dim < out.shape[1]:
        out[:, head_dim:].zero_()
    out[:, :head_dim] = as_bytes(cache).index_select(0, index).view(cache.dtype)


def _cap(space: Workspace, cap: float) -> None:
    """Turn scores into `cap` * tanh: tanh(x) = 1 - 2 / (exp(2 x) + 1). Vectors: see `_softmax`.

    Mutates: the scores of the workspace.
    """
    for chunk in space.score_chunks:
        chunk.exp2_().add_(1).reciprocal_().mul_(-2 * cap).add_(cap)


def _softmax(space: Workspace, sinks: torch.Tensor | None) -> torch.Tensor:
    """Turn scores into weights and return their sums, [Hkv, n, G]: tiles in order, then sinks.

    torch computes 2^x by vectors and the rest of a range by a scalar function of other bits. There
    is never a rest: tiles are wider than vectors, and chunks too short to be cut for threads.

    Mutates: the scores of the workspace.
    """
    if len(space.masked_scores):
        space.masked_scores.add_(space.rows.mask)
    scores = space.scores
    is_single = scores.shape[0] == 1
    largest = scores.amax(-1, keepdim=True)  # [tiles, Hkv, n, G, 1]
    largest = largest[0] if is_single else largest.amax(0)
    if sinks is not None:
        largest = torch.maximum(largest, sinks)
    scores.sub_(largest)
    for chunk in space.score_chunks:
        chunk.exp2_()
    sums = scores.sum(-1)
    if is_single and sinks is None:
        return sums[0]
    totals = sums.cumsum(0, dtype=torch.float64)[-1]
    if sinks is not None:
        totals += _exp2((sinks - largest).squeeze(-1))
    return totals.to(sums.dtype)


def _padded_sinks(sinks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return sinks [Hq] f32 by their groups, as wide as a workspace has these. [Hkv, 1, G, 1]."""
    grouped = sinks.view(num_kv_heads, 1, -1, 1)
    group = grouped.shape[2]
    return functional.pad(grouped, (0, 0, 0, padded(group, GROUP_MULTIPLE) - group))


def _exp2(values: torch.Tensor) -> torch.Tensor:
    """Return 2^x as `_softmax` computes it: by vectors alone, and on one thread."""
    count = values.numel()
    powers = values.new_zeros(padded(count, CPU_KV_TILE))
    powers[:count] = values.flatten()
    for chunk in powers.split(ELEMENTWISE_CHUNK):
        chunk.exp2_()
    return powers[:count].view(values.shape)
