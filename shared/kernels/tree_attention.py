"""Attention of tree or chain rows over paged K/V, reduced in order of KV index."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS, count_launch, dot_dtype, use_triton
from shared.kernels.tree_attention_metadata import TreeAttentionMetadata
from shared.kernels.tree_attention_ref import tree_attention_ref

__all__ = ["TRITON_KV_TILE", "TreeAttentionMetadata", "tree_attention", "tree_attention_ref"]

# KV indices of one tile of the kernel, the wide operand of both products.
TRITON_KV_TILE = 64
# Narrow side of both products, rows x query heads of one KV head, by bytes per value.
_COLUMNS = {4: 32, 2: 64}


@triton.jit(do_not_specialize=["num_reqs", "page_table_stride", "path_offset_stride", "window"])
def _tree_attention_kernel(
    q_ptr,  # [T, Hq, d]
    k_cache_ptr,  # [num_slots, Hkv, d]
    v_cache_ptr,  # [num_slots, Hkv, d]
    out_ptr,  # [T, Hq, d] mutated
    page_table_ptr,  # [max_reqs, max_pages_per_req] i32
    req_idx_ptr,  # [R] i32
    prefix_len_ptr,  # [R] i32
    row_indptr_ptr,  # [R + 1] i32
    path_len_ptr,  # [T] i32
    path_offset_ptr,  # [T, D] i32
    is_chain_ptr,  # [R] bool
    num_reqs,
    q_stride,
    page_table_stride,
    path_offset_stride,
    window,
    scale,
    DOT_DTYPE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    REQ_BLOCK: tl.constexpr,
):
    kv_head = tl.program_id(1).to(tl.int64)
    # Program -> (request, first row): requests have ceil(rows / ROWS) programs each, in order.
    pid = tl.program_id(0)
    req_lane = tl.arange(0, REQ_BLOCK)
    in_reqs = req_lane < num_reqs
    lane_begin = tl.load(row_indptr_ptr + req_lane, mask=in_reqs, other=0)
    lane_end = tl.load(row_indptr_ptr + req_lane + 1, mask=in_reqs, other=0)
    lane_programs = (lane_end - lane_begin + ROWS - 1) // ROWS
    is_before = (tl.cumsum(lane_programs, axis=0) <= pid) & in_reqs
    request = tl.sum(is_before.to(tl.int32), axis=0)
    if request < num_reqs:
        local_pid = pid - tl.sum(tl.where(is_before, lane_programs, 0), axis=0)
        row_end = tl.load(row_indptr_ptr + request + 1)
        row_begin = tl.load(row_indptr_ptr + request) + local_pid * ROWS
        prefix_len = tl.load(prefix_len_ptr + request)
        is_chain = tl.load(is_chain_ptr + request).to(tl.int32) != 0
        path_begin = tl.where(is_chain, 0x7FFFFFFF, 0)  # a chain has no path_offset to read
        pages_ptr = page_table_ptr + tl.load(req_idx_ptr + request).to(tl.int64) * page_table_stride

        column = tl.arange(0, ROWS * GROUP_BLOCK)  # narrow side: rows x heads of the group
        column_row = column // GROUP_BLOCK
        column_head = column % GROUP_BLOCK
        row = (row_begin + column_row).to(tl.int64)
        is_live = (row < row_end) & (column_head < GROUP)
        dim = tl.arange(0, DIM_BLOCK)
        in_dim = dim < HEAD_DIM
        q_offset = row * q_stride + (kv_head * GROUP + column_head) * HEAD_DIM
        q = tl.load(
            q_ptr + q_offset[None, :] + dim[:, None],
            mask=is_live[None, :] & in_dim[:, None],
            other=0.0,
        ).to(DOT_DTYPE)  # [DIM_BLOCK, COLUMNS]
        kv_len = prefix_len + tl.load(path_len_ptr + row, mask=row < row_end, other=0)
        kv_start = tl.where(window > 0, tl.maximum(kv_len - window, 0), 0)
        longest = tl.max(tl.where(row < row_end, kv_len, 0), axis=0)
        earliest = tl.min(tl.where(row < row_end, kv_start, 0x7FFFFFFF), axis=0)

        # Steps: tiles that all rows share; then, for a tree, row by row the tiles that hold its
        # own path.
        first_tile = earliest // TILE
        own_tile = tl.where(is_chain, (longest + TILE - 1) // TILE, prefix_len // TILE)
        own_tile = tl.maximum(own_tile, first_tile)
        num_shared = own_tile - first_tile
        num_own = (longest + TILE - 1) // TILE - own_tile
        num_steps = num_shared + num_own * tl.minimum(row_end - row_begin, ROWS)
        shared_end = tl.where(is_chain, longest, own_tile * TILE)

        largest = tl.full((ROWS * GROUP_BLOCK,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((ROWS * GROUP_BLOCK,), dtype=tl.float32)
        acc = tl.zeros((DIM_BLOCK, ROWS * GROUP_BLOCK), dtype=tl.float32)
        for step in range(num_steps):
            is_shared = step < num_shared
            own_step = tl.maximum(step - num_shared, 0)
            own_row = own_step // tl.maximum(num_own, 1)
            own_rank = own_step - own_row * num_own
            tile = tl.where(is_shared, first_tile + step, own_tile + own_rank)
            own_len = prefix_len + tl.load(path_len_ptr + row_begin + own_row)
            end = tl.where(is_shared, shared_end, own_len)
            kv_index = tile * TILE + tl.arange(0, TILE)
            is_read = (kv_index >= earliest) & (kv_index < end)
            path_index = kv_index - prefix_len
            on_tree_path = is_read & (path_index >= path_begin)
            offset = tl.load(
                path_offset_ptr
                + (row_begin + own_row).to(tl.int64) * path_offset_stride
                + path_index,
                mask=on_tree_path,
                other=0,
            )
            logical = tl.where(on_tree_path, prefix_len + offset, kv_index)
            page = tl.load(pages_ptr + logical // PAGE_SIZE, mask=is_read, other=0).to(tl.int64)
            slot = page * PAGE_SIZE + logical % PAGE_SIZE
            kv_offset = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
            kv_mask = is_read[:, None] & in_dim[None, :]
            k = tl.load(k_cache_ptr + kv_offset, mask=kv_mask, other=0.0).to(DOT_DTYPE)
            v = tl.load(v_cache_ptr + kv_offset, mask=kv_mask, other=0.0).to(DOT_DTYPE)

            scores = tl.dot(k, q, input_precision="ieee") * scale  # [TILE, COLUMNS]
            active_begin = tl.where(is_shared, 0, own_row)
            active_end = tl.where(is_shared, ROWS, own_row + 1)
            is_active = (column_row >= active_begin) & (column_row < active_end)
            is_visible = (kv_index[:, None] < tl.minimum(kv_len, end)[None, :]) & (
                kv_index[:, None] >= kv_start[None, :]
            )
            scores = tl.where(is_visible & is_active[None, :], scores, -float("inf"))
            new_largest = tl.maximum(largest, tl.max(scores, axis=0))
            shift = tl.where(new_largest == -float("inf"), 0.0, new_largest)
            weights = tl.exp(scores - shift[None, :])
            decay = tl.exp(largest - shift)
            total = tl.where(is_active, total * decay + tl.sum(weights, axis=0), total)
            product = tl.dot(tl.trans(v), weights.to(DOT_DTYPE), input_precision="ieee")
            acc = tl.where(is_active[None, :], acc * decay[None, :] + product, acc)
            largest = new_largest

        out = acc / tl.where(total > 0.0, total, 1.0)[None, :]
        out_offset = (
            row * (NUM_KV_HEADS * GROUP * HEAD_DIM) + (kv_head * GROUP + column_head) * HEAD_DIM
        )
        tl.store(
            out_ptr + out_offset[None, :] + dim[:, None],
            out.to(out_ptr.dtype.element_ty),
            mask=is_live[None, :] & in_dim[:, None],
        )


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
    if not use_triton(q):
        return tree_attention_ref(q, k_cache, v_cache, metadata, scale)
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape
    assert k_cache.dtype == v_cache.dtype == q.dtype and num_heads % num_kv_heads == 0
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        q = q.contiguous()
    out = torch.zeros((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    group = num_heads // num_kv_heads
    group_block = triton.next_power_of_2(group)
    rows = max(1, _COLUMNS[q.element_size()] // group_block)
    num_reqs = metadata.req_idx.shape[0]
    # Never fewer programs than the requests need, and no read-back of how many those are.
    grid = (num_rows // rows + num_reqs, num_kv_heads)
    if num_rows == 0 or num_reqs == 0:
        return out
    count_launch("tree_attention")
    _tree_attention_kernel[grid](
        q,
        k_cache,
        v_cache,
        out,
        metadata.page_table,
        metadata.req_idx,
        metadata.prefix_len,
        metadata.row_indptr,
        metadata.path_len,
        metadata.path_offset,
        metadata.is_chain,
        num_reqs,
        q.stride(0),
        metadata.page_table.stride(0),
        metadata.path_offset.stride(0),
        metadata.window,
        scale,
        DOT_DTYPE=dot_dtype(q),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_BLOCK=group_block,
        HEAD_DIM=head_dim,
        DIM_BLOCK=max(16, triton.next_power_of_2(head_dim)),
        PAGE_SIZE=metadata.page_size,
        ROWS=rows,
        TILE=TRITON_KV_TILE,
        REQ_BLOCK=triton.next_power_of_2(num_reqs),
        num_warps=4,
        **LAUNCH_OPTIONS,
    )
    return out
