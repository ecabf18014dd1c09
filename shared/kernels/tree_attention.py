"""Attention of tree or chain rows over paged K/V, reduced in order of KV index."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# KV indices of one CPU tile; tiles are cut at multiples of it, whatever the batch.
CPU_KV_TILE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAttentionMetadata:
    """Which K/V every row of a step sees.

    Logical slot s of a request: page_table[req_idx, s // page_size] * page_size + s % page_size.
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


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: TreeAttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attend from every row to its prefix and its own path.

    A row's bits are a function of its q and its K/V in KV-index order only: not of the batch, the
    tree, the page size, or where its path was cut into prefix and block.

    Args:
        q: [T, Hq, d].
        k_cache: [num_slots, Hkv, d]; slots that no row sees may hold anything, NaN included.
        v_cache: [num_slots, Hkv, d].
        metadata: TreeAttentionMetadata of the T rows.
        scale: Multiplies the scores.
    Returns: [T, Hq, d] in the dtype of q; 0 in padding rows.
    """
    return tree_attention_ref(q, k_cache, v_cache, metadata, scale)


def tree_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: TreeAttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Do what `tree_attention` does in plain torch: one product per (row, KV head, tile)."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    out = q.new_zeros((num_rows, num_kv_heads, group, head_dim), dtype=torch.float32)
    meta = metadata
    device = q.device
    rows_per_req = (meta.row_indptr[1:] - meta.row_indptr[:-1]).long()
    request = torch.repeat_interleave(torch.arange(len(rows_per_req), device=device), rows_per_req)
    num_live = len(request)
    if num_live == 0:
        return out.view_as(q).to(q.dtype)
    prefix_len = meta.prefix_len.long()[request]
    kv_len = prefix_len + meta.path_len[:num_live].long()
    kv_start = (kv_len - meta.window).clamp(min=0) if meta.window else torch.zeros_like(kv_len)
    first_tile = kv_start // CPU_KV_TILE
    num_tiles = -(-kv_len // CPU_KV_TILE) - first_tile
    item_row = torch.repeat_interleave(torch.arange(num_live, device=device), num_tiles)
    item_first = num_tiles.cumsum(0) - num_tiles
    item_rank = torch.arange(len(item_row), device=device) - item_first[item_row]
    kv_index = (first_tile[item_row] + item_rank).unsqueeze(1) * CPU_KV_TILE + torch.arange(
        CPU_KV_TILE, device=device
    )  # [I, TILE]
    is_visible = (kv_index < kv_len[item_row, None]) & (kv_index >= kv_start[item_row, None])
    # What a row may not see is replaced by the row itself: finite, and weighted by an exact 0.
    kv_index = torch.where(is_visible, kv_index, kv_len[item_row, None] - 1)
    path_index = kv_index - prefix_len[item_row, None]
    if meta.path_offset.shape[1] > 0:
        depth = meta.path_offset.shape[1]
        offset = meta.path_offset.long()[item_row].gather(1, path_index.clamp(0, depth - 1))
        is_tree_path = (path_index >= 0) & ~meta.is_chain[request[item_row], None]
        kv_index = torch.where(is_tree_path, prefix_len[item_row, None] + offset, kv_index)
    pages = meta.page_table[meta.req_idx.long()[request[item_row]]].long()
    page = pages.gather(1, kv_index // meta.page_size)
    slot = page * meta.page_size + kv_index % meta.page_size  # [I, TILE]

    head = torch.arange(num_kv_heads, device=device)
    index = (slot.unsqueeze(1) * num_kv_heads + head[:, None]).flatten()  # [I * Hkv * TILE]
    batch = len(item_row) * num_kv_heads
    k = k_cache.flatten(0, 1).index_select(0, index).float().view(batch, CPU_KV_TILE, head_dim)
    v = v_cache.flatten(0, 1).index_select(0, index).float().view(batch, CPU_KV_TILE, head_dim)
    grouped = q[:num_live].float().view(num_live, num_kv_heads, group, head_dim)
    item_q = grouped[item_row].view(batch, group, head_dim)
    scores = torch.bmm(item_q, k.transpose(1, 2)).view(-1, num_kv_heads, group, CPU_KV_TILE)
    scores = (scores * scale).masked_fill(~is_visible[:, None, None], -torch.inf)

    padded = scores.new_full((num_live, int(num_tiles.max()), *scores.shape[1:]), -torch.inf)
    padded[item_row, item_rank] = scores
    largest = padded.amax(dim=(1, 4))  # [T, Hkv, group]
    weights = torch.exp(scores - largest[item_row, ..., None])
    tile_sums = weights.sum(-1)
    products = torch.bmm(weights.view(batch, group, CPU_KV_TILE), v)
    products = products.view(-1, num_kv_heads, group, head_dim)
    sums = torch.zeros_like(largest)
    for rank in range(int(num_tiles.max())):
        items = (item_rank == rank).nonzero().flatten()
        out[item_row[items]] += products[items]
        sums[item_row[items]] += tile_sums[items]
    out[:num_live] /= sums.unsqueeze(-1)
    return out.view_as(q).to(q.dtype)
