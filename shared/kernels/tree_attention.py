"""Attention of tree or chain rows over paged K/V, reduced in order of KV index.

Two launches: the tiles that all rows of a request share, split over programs by chunks of KV index,
then row by row what is left: a tree row's own tiles, and the sum of it all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS, count_launch, dot_dtype, use_triton
from shared.kernels.tree_attention_kernels import (
    _SEQUENTIAL_STATES,
    _finish_rows_kernel,
    _shared_tiles_kernel,
)
from shared.kernels.tree_attention_metadata import TreeAttentionMetadata
from shared.kernels.tree_attention_ref import tree_attention_ref
from shared.kernels.tree_attention_tiles import TRITON_CHUNK_TILES, TRITON_KV_TILE, num_chunks

__all__ = ["TreeAttentionMetadata", "attend_in_chunks", "tree_attention", "tree_attention_ref"]

_Options = dict[str, Any]

_LOG2_E = math.log2(math.e)
# Programs that a step is split into, as far as its chunks go: a few per multiprocessor.
_SPLIT_PROGRAMS = 1024
# Fewer requests than a warp has lanes are no reason for another binary.
_MIN_REQ_BLOCK = 32
# Above either of these a step is not split: its rows fill a GPU, or its states its memory.
_MAX_SPLIT_ROWS = 256
_MAX_SPLIT_STATES = 1 << 14


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
    return attend_in_chunks(q, k_cache, v_cache, metadata, scale)


def attend_in_chunks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: TreeAttentionMetadata,
    scale: float,
    *,
    num_splits: int | None = None,
    chunk_tiles: int = TRITON_CHUNK_TILES,
) -> torch.Tensor:
    """Do what `tree_attention` does by its kernels.

    Args:
        num_splits: Programs per block of rows and KV head, whatever the rows; 0: one, which keeps
            the states of closed chunks to itself. The bits are the same.
        chunk_tiles: Tiles of the shortest chunks.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape
    assert k_cache.dtype == v_cache.dtype == q.dtype and num_heads % num_kv_heads == 0
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        q = q.contiguous()
    num_reqs = metadata.req_idx.shape[0]
    if num_rows == 0 or num_reqs == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    max_chunks = num_chunks(metadata.page_table.shape[1] * metadata.page_size, chunk_tiles)
    is_sequential = num_splits == 0
    if num_splits is None:
        is_split = num_rows <= _MAX_SPLIT_ROWS and num_rows * max_chunks <= _MAX_SPLIT_STATES
        is_sequential = not is_split

    group = num_heads // num_kv_heads
    group_block = triton.next_power_of_2(group)
    dim_block = max(16, triton.next_power_of_2(head_dim))
    dot = dot_dtype(q)
    queries = choose_queries(dot, is_sequential=is_sequential and dim_block <= 128)
    queries = max(queries, group_block)
    rows = queries // group_block
    # Never fewer programs than blocks of rows, and no read-back of how many those are.
    num_programs = min(num_rows, num_rows // rows + num_reqs)
    if num_splits:
        num_programs *= num_splits
    elif not is_sequential:
        wanted = max(num_programs, _SPLIT_PROGRAMS // num_kv_heads)
        num_programs = min(num_programs * max_chunks, wanted)
    num_states = _SEQUENTIAL_STATES.value if is_sequential else max_chunks
    states = (num_rows, num_kv_heads, num_states, group)
    stats = torch.empty((*states, 2), dtype=torch.float32, device=q.device)
    acc = torch.empty((*states, head_dim), dtype=torch.float32, device=q.device)
    # Rows are left to the second kernel, padding included, unless there is nothing else for it.
    is_done = is_sequential and not metadata.has_trees
    new_out = torch.zeros if is_done else torch.empty
    out = new_out((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)

    shape = {
        "DOT_DTYPE": dot,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "GROUP_BLOCK": group_block,
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": dim_block,
        "PAGE_SIZE": metadata.page_size,
        "TILE": TRITON_KV_TILE,
        "CHUNK_TILES": chunk_tiles,
        "REQ_BLOCK": max(_MIN_REQ_BLOCK, triton.next_power_of_2(num_reqs)),
        "HAS_WINDOW": metadata.window > 0,
        "SEQUENTIAL": is_sequential,
    }
    count_launch("tree_attention")
    _shared_tiles_kernel[(num_programs, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        out,
        stats,
        acc,
        metadata.page_table,
        metadata.req_idx,
        metadata.prefix_len,
        metadata.row_indptr,
        metadata.path_len,
        metadata.is_chain,
        num_reqs,
        q.stride(0),
        metadata.page_table.stride(0),
        num_states,
        metadata.window,
        1 if is_sequential else num_splits or 0,
        scale * _LOG2_E,
        **shape,
        ROWS=rows,
        **shared_options(dot, dim_block, queries),
        **LAUNCH_OPTIONS,
    )
    if is_done:
        return out
    _finish_rows_kernel[(num_rows, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        out,
        stats,
        acc,
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
        num_states,
        metadata.window,
        scale * _LOG2_E,
        **shape,
        QUERIES=max(choose_queries(dot), group_block),
        **finish_options(dot, dim_block),
        **LAUNCH_OPTIONS,
    )
    return out


def choose_queries(dot: tl.dtype, *, is_sequential: bool = False) -> int:
    """Return the rows x heads of a product: those of a tensor core's instruction, or of two.

    Float32 products have one shape, as the interpreter's BLAS may give rows of another one other
    bits.
    """
    if dot == tl.float32:
        return 16
    return 128 if is_sequential else 64


def shared_options(dot: tl.dtype, dim_block: int, queries: int) -> _Options:
    """Return launch options by which states stay in registers and tiles fit into shared memory."""
    if dot == tl.float32:
        return {"num_warps": 8, "num_stages": 1}
    return {"num_warps": 4 * (queries // 64), "num_stages": 2}


def finish_options(dot: tl.dtype, dim_block: int) -> _Options:
    """Return launch options likewise."""
    if dot == tl.float32:
        return {"num_warps": 8, "num_stages": 1}
    return {"num_warps": 4, "num_stages": 1}
