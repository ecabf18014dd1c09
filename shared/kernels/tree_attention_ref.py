"""Tree attention in plain torch: the reference of the kernel, and what CPU servers run.

Exact by construction. KV tiles are cut at multiples of KV index; every (row, KV head, tile) is one
item of a batched product, [group, d] x [d, TILE] and [group, TILE] x [TILE, d], whose bits depend
on nothing but its operands; a row's tiles are added in ascending order. Where the operands of an
item come from is free: tiles that all rows of a request share are gathered once, the tiles that
hold a row's own path once per row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shared.kernels.tree_attention_metadata import TreeAttentionMetadata
from shared.kernels.tree_attention_plan import CPU_KV_TILE, RowSlice, TreeAttentionPlan, plan_rows
from shared.kernels.vector_math import settle_vector_math


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
    key = (num_heads, num_kv_heads, head_dim, q.device)
    plan = metadata.plans.get(key)
    if plan is None:
        plan = plan_rows(metadata, num_heads, num_kv_heads, head_dim, q.device)
        metadata.plans[key] = plan
    scaled = (q.float() * scale).view(num_rows, num_kv_heads, -1, head_dim) if num_rows else q
    out = torch.zeros_like(scaled)
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    for rows in plan.slices:
        _attend(scaled, keys, values, rows, plan, out)
    return out.view(num_rows, num_heads, head_dim).to(q.dtype)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: RowSlice,
    plan: TreeAttentionPlan,
    out: torch.Tensor,
) -> None:
    """Attend from a slice of rows.

    Args:
        q: [T, Hkv, group, d], scaled.
        keys: [num_slots * Hkv, d].
        values: [num_slots * Hkv, d].
        out: [T, Hkv, group, d], 0 in these rows.
    Mutates: the slice's rows of `out`; the buffers of `plan`.
    """
    _, num_kv_heads, group, head_dim = q.shape
    num_heads = num_kv_heads * group
    tiles = (-1, num_kv_heads, CPU_KV_TILE, head_dim)
    k = _gather(keys, rows.index, plan.k).view(tiles)
    v = _gather(values, rows.index, plan.v).view(tiles)
    scores = plan.scores[: rows.num_items]  # [items, Hkv, group, TILE]
    has_own = rows.own_item < rows.num_items

    for item_q, item_scores, item_k in _shared_items(rows, q, scores, k.transpose(2, 3)):
        for score, key in zip(item_scores, item_k, strict=True):
            torch.bmm(item_q, key, out=score)
    if has_own:
        own_q = q.index_select(0, rows.own_row).view(-1, group, head_dim)
        own_k = k[rows.own_tile :].view(-1, CPU_KV_TILE, head_dim)
        own_scores = scores[rows.own_item :].view(-1, group, CPU_KV_TILE)
        torch.bmm(own_q, own_k.transpose(1, 2), out=own_scores)

    totals = _softmax(scores.view(-1, num_heads, CPU_KV_TILE), rows)

    for acc, item_weights, item_v in _shared_items(rows, out, scores, v):
        for weight, value in zip(item_weights, item_v, strict=True):
            acc += torch.bmm(weight, value)
    if has_own:
        own_weights = scores[rows.own_item :].view(-1, group, CPU_KV_TILE)
        own_v = v[rows.own_tile :].view(-1, CPU_KV_TILE, head_dim)
        products = plan.products[: rows.num_items - rows.own_item]
        torch.bmm(own_weights, own_v, out=products.view(-1, group, head_dim))
        for begin, end, own_rows in rows.own_ranks:
            if isinstance(own_rows, slice):
                out[own_rows] += products[begin:end]
            else:
                out.index_add_(0, own_rows, products[begin:end])
    out[rows.row_begin : rows.row_end] /= totals.view(-1, num_kv_heads, group, 1)


def _gather(cache: torch.Tensor, index: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return the rows `index` of a cache in float32, in a buffer."""
    gathered = buffer[: len(index)]
    if cache.dtype == buffer.dtype:
        return torch.index_select(cache, 0, index, out=gathered)
    return gathered.copy_(cache.index_select(0, index))


def _shared_items(
    rows: RowSlice, by_row: torch.Tensor, by_item: torch.Tensor, by_tile: torch.Tensor
) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """Yield, for every segment of rows and KV head, the rows and their operands tile by tile.

    Args:
        by_row: [T, Hkv, ...].
        by_item: [items, Hkv, ...].
        by_tile: [tiles, Hkv, ...].
    """
    for segment in rows.shared:
        count = segment.row_end - segment.row_begin
        last_item = segment.item + count * segment.num_tiles
        items = by_item[segment.item : last_item].unflatten(0, (segment.num_tiles, count))
        tiles = by_tile[segment.tile : segment.tile + segment.num_tiles].unsqueeze(1)
        tiles = tiles.expand(-1, count, -1, -1, -1)
        for head in range(by_row.shape[1]):
            yield (
                by_row[segment.row_begin : segment.row_end, head],
                items[:, :, head].unbind(0),
                tiles[:, :, head].unbind(0),
            )


def _softmax(scores: torch.Tensor, rows: RowSlice) -> torch.Tensor:
    """Turn scores into weights and return their sum per row, [rows, H], tiles added in order.

    Args:
        scores: [items, H, TILE].
    Mutates: `scores`.
    """
    scores[rows.masked_item :].add_(rows.mask)
    # One more item stands for the tiles that a row does not have.
    stats = scores.new_empty((rows.num_items + 1, scores.shape[1]))
    per_row = (rows.row_end - rows.row_begin, -1, scores.shape[1])
    torch.amax(scores, -1, out=stats[:-1])
    stats[-1] = -torch.inf
    largest = stats.index_select(0, rows.row_items).view(per_row).amax(1)
    scores.sub_(largest.index_select(0, rows.item_row).unsqueeze(-1)).exp_()
    torch.sum(scores, -1, out=stats[:-1])
    stats[-1] = 0
    sums = stats.index_select(0, rows.row_items).view(per_row)
    return sums.cumsum(1, dtype=torch.float64)[:, -1].to(scores.dtype)
