"""Attention of tree or chain rows over paged K/V, reduced in order of KV index.

Two launches: the tiles that all rows of a request share, split over programs by chunks of KV index,
then row by row what is left: a tree row's own tiles, and the sum of it all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch
from shared.kernels.dispatch import count_launch, dot_dtype, use_triton
from shared.kernels.fp8_cache import as_bytes, is_fp8
from shared.kernels.page_slots import slots_in
from shared.kernels.products_cpu import CpuProducts
from shared.kernels.tree_attention_cpu import tree_attention_cpu
from shared.kernels.tree_attention_kernels import (
    _SEQUENTIAL_STATES,
    _finish_rows_kernel,
    _shared_tiles_kernel,
)
from shared.kernels.tree_attention_metadata import AttentionParams, TreeAttentionMetadata
from shared.kernels.tree_attention_schedule import Cut, cut_work, schedule, with_schedule
from shared.kernels.tree_attention_tiles import TRITON_CHUNK_TILES, TRITON_KV_TILE, num_chunks

__all__ = [
    "AttentionParams",
    "TreeAttentionMetadata",
    "attend_in_chunks",
    "prepared",
    "tree_attention",
    "tree_attention_ref",
]

_Options = dict[str, Any]

_LOG2_E = math.log2(math.e)
# Programs that a step is split into, as far as its chunks go: a few per multiprocessor.
_SPLIT_PROGRAMS = 512
# Above either of these a step is not split: its rows fill a GPU, or its states its memory.
_MAX_SPLIT_ROWS = 512
_MAX_SPLIT_STATES = 18 << 10
# Rows x heads of a product where requests have few rows.
_FEW_QUERIES = 16


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: TreeAttentionMetadata,
    params: AttentionParams,
    *,
    products: CpuProducts | None = None,
) -> torch.Tensor:
    """Attend from every row to its prefix and its own path.

    A row's bits are a function of its q and its K/V in KV-index order only: not of the batch, the
    tree, the page size, or where its path was cut into prefix and block.

    Args:
        q: [T, Hq, d].
        k_cache: [num_slots, Hkv, d]; slots that no row sees may hold anything, NaN included. In the
            dtype of q, or in FP8 (e4m3).
        v_cache: [num_slots, Hkv, dv], likewise; dv need not be d.
        metadata: TreeAttentionMetadata of the T rows.
        products: How a CPU multiplies; None: by a library.
    Returns: [T, Hq, dv] in the dtype of q; 0 in padding rows.
    """
    if not use_triton(q):
        return tree_attention_cpu(q, k_cache, v_cache, metadata, params, products=products)
    return attend_in_chunks(q, k_cache, v_cache, metadata, params)


def attend_in_chunks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: TreeAttentionMetadata,
    params: AttentionParams,
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
    _check(q, k_cache, v_cache, params.sinks)
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, v_dim = v_cache.shape[1:]
    sinks = params.sinks
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        q = q.contiguous()
    if num_rows == 0 or metadata.req_idx.shape[0] == 0:
        return torch.zeros((*q.shape[:2], v_dim), dtype=q.dtype, device=q.device)
    dot = dot_dtype(q)
    cut = _cut(metadata, dot, num_heads, num_kv_heads, num_splits, chunk_tiles)
    assert num_rows == metadata.path_len.shape[0]
    is_prepared = cut in metadata.plans  # else its tables are not complete when programs start
    tables = schedule(metadata, cut)
    is_sequential = cut.is_sequential
    group = num_heads // num_kv_heads
    dim_block, v_block = (max(16, triton.next_power_of_2(width)) for width in (head_dim, v_dim))
    num_states = cut.max_chunks
    if is_sequential:
        num_states = max(_SEQUENTIAL_STATES.value, num_states if cut.by_length else 0)
    states = (num_rows, num_kv_heads, num_states, group)
    stats = torch.empty((*states, 2), dtype=torch.float32, device=q.device)
    acc = torch.empty((*states, v_dim), dtype=torch.float32, device=q.device)
    # Rows are left to the second kernel, padding included, unless there is nothing else for it.
    is_done = cut.is_whole and not metadata.has_trees
    new_out = torch.zeros if is_done else torch.empty
    out = new_out((num_rows, num_heads, v_dim), dtype=q.dtype, device=q.device)

    group_block = triton.next_power_of_2(group)
    own_queries = max(choose_own_queries(dot, q.device), group_block)
    shape = {
        "DOT_DTYPE": dot,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "GROUP_BLOCK": group_block,
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": dim_block,
        "V_DIM": v_dim,
        "V_BLOCK": v_block,
        "TILE": TRITON_KV_TILE,
        "CHUNK_TILES": chunk_tiles,
        "SEQUENTIAL": is_sequential,
        "HAS_SINKS": sinks is not None,
        "HAS_SOFTCAP": params.softcap > 0,
    }
    sinks = stats if sinks is None else sinks
    tensors = (q, as_bytes(k_cache), as_bytes(v_cache), sinks, out, stats, acc)
    numbers = (q.stride(0), num_states, *_score_scales(params, k_cache))
    count_launch("tree_attention")
    _shared_tiles_kernel[(num_kv_heads, cut.num_programs)](
        *tensors,
        metadata.page_table,
        tables.blocks,
        tables.rows,
        *numbers,
        **shape,
        PAGE_SIZE=metadata.page_size,
        HAS_WINDOW=metadata.window > 0,
        ROWS=cut.rows,
        **shared_options(dot, max(dim_block, v_block), cut.rows * group_block),
        **dependent_launch(q, is_early=is_prepared),
    )
    if is_done:
        return out
    _finish_rows_kernel[(num_rows, num_kv_heads)](
        *tensors,
        tables.own_slots,
        tables.rows,
        *numbers,
        **shape,
        OWN_SLOTS=tables.own_slots.shape[1],
        QUERIES=own_queries,
        **finish_options(dot, max(dim_block, v_block), own_queries),
        **dependent_launch(q),
    )
    return out


def _check(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sinks: torch.Tensor | None
) -> None:
    """Check shapes, layouts and dtypes."""
    num_heads = q.shape[1]
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    assert k_cache.shape == (*v_cache.shape[:2], q.shape[2])
    assert k_cache.dtype == v_cache.dtype and num_heads % k_cache.shape[1] == 0
    assert is_fp8(k_cache) or k_cache.dtype == q.dtype
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (num_heads,))


def _score_scales(
    params: AttentionParams, k_cache: torch.Tensor
) -> tuple[float, float, float | None]:
    """Return what kernels multiply: scores, products under a cap, and V in FP8 (else None)."""
    scale, softcap, v_scale = params.scale, params.softcap, None
    if is_fp8(k_cache):
        scale, v_scale = scale * params.kv_scales.k, params.kv_scales.v
    # Weights are powers of 2. Under a cap scores are tanh, of half of what its exponential takes.
    if softcap:
        return softcap * _LOG2_E, 2 * scale / softcap * _LOG2_E, v_scale
    return scale * _LOG2_E, 1.0, v_scale


def prepared(
    metadata: TreeAttentionMetadata, q_dtype: torch.dtype, num_heads: int, num_kv_heads: int
) -> TreeAttentionMetadata:
    """Return the metadata of one forward, with what all of its layers share computed on a GPU.

    Whoever does without has it computed at the first `tree_attention`, which then starts later.
    """

    def cut(metadata: TreeAttentionMetadata, dot: tl.dtype) -> Cut:
        return _cut(metadata, dot, num_heads, num_kv_heads, None, TRITON_CHUNK_TILES)

    return with_schedule(metadata, q_dtype, cut)


def _cut(
    metadata: TreeAttentionMetadata,
    dot: tl.dtype,
    num_heads: int,
    num_kv_heads: int,
    num_splits: int | None,
    chunk_tiles: int,
) -> Cut:
    """Return how the work is cut, see `attend_in_chunks`."""
    num_rows = metadata.path_len.shape[0]
    if num_splits is None and metadata.most_rows:
        few_rows = few_rows_of(num_heads, num_kv_heads)
        if (
            metadata.most_rows <= few_rows
            and choose_own_queries(dot, metadata.req_idx.device) == 16
        ):
            return _cut_few(metadata, few_rows, _SPLIT_PROGRAMS // num_kv_heads, chunk_tiles)

    def is_small(num_blocks: int, max_chunks: int) -> bool:
        return num_rows <= _MAX_SPLIT_ROWS and num_rows * max_chunks <= _MAX_SPLIT_STATES

    return cut_work(
        metadata,
        rows=max(1, choose_queries(dot) // triton.next_power_of_2(num_heads // num_kv_heads)),
        chunk_tiles=chunk_tiles,
        num_splits=num_splits,
        wanted=_SPLIT_PROGRAMS // num_kv_heads,
        is_small=is_small,
    )


def few_rows_of(num_heads: int, num_kv_heads: int) -> int:
    """Return how many rows of a request a product of 16 rows x heads holds; 0: not one."""
    return _FEW_QUERIES // triton.next_power_of_2(num_heads // num_kv_heads)


def _cut_few(metadata: TreeAttentionMetadata, rows: int, wanted: int, chunk_tiles: int) -> Cut:
    """Cut the work of a step whose requests have few rows each: a block for each request.

    Args:
        rows: That no request has more than.
        wanted: Programs per KV head.
    """
    num_rows, num_reqs = metadata.path_len.shape[0], metadata.req_idx.shape[0]
    max_chunks = num_chunks(metadata.page_table.shape[1] * metadata.page_size, chunk_tiles)
    by_length = num_rows * max_chunks <= _MAX_SPLIT_STATES
    return Cut(
        rows=rows,
        num_programs=min(num_rows, num_reqs) + (wanted if by_length else 0),
        num_splits=wanted if by_length else 1,
        max_chunks=max_chunks,
        chunk_tiles=chunk_tiles,
        is_sequential=True,
        by_length=by_length,
    )


def choose_queries(dot: tl.dtype) -> int:
    """Return the rows x heads of a product: those of a tensor core's instruction.

    Float32 products have one shape, as the interpreter's BLAS may give rows of another one other
    bits.
    """
    return 16 if dot == tl.float32 else 64


def choose_own_queries(dot: tl.dtype, device: torch.device) -> int:
    """Return the rows x heads of a product of one row's own tiles, of which few are heads.

    16 where a product of 16 rows is known to have the bits of one of 64: up to Hopper, whose
    `mma.sync` and `wgmma` add alike (tests/kernels/test_products.py).
    """
    is_known = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] <= 9
    return 16 if is_known or dot == tl.float32 else 64


def shared_options(dot: tl.dtype, dim_block: int, queries: int) -> _Options:
    """Return launch options by which states stay in registers and tiles fit into shared memory."""
    if dot == tl.float32 or dim_block > 256:  # a tile of K and one of V are all that fits
        return {"num_warps": 8, "num_stages": 1}
    num_stages = 3 if dim_block <= 128 else 2
    if queries < 64:  # of few scores, sums are the faster the fewer threads share a row
        return {"num_warps": 2 if dim_block <= 128 else 4, "num_stages": num_stages}
    return {"num_warps": 4 * (queries // 64), "num_stages": num_stages}


def finish_options(dot: tl.dtype, dim_block: int, queries: int) -> _Options:
    """Return launch options likewise; the fewer warps and registers, the more programs at once."""
    if dot == tl.float32 or dim_block > 256:
        return {"num_warps": 8, "num_stages": 1}
    if queries < 64:
        return {"num_warps": 2 if dim_block <= 128 else 4, "num_stages": 1}
    if dim_block > 128:
        return {"num_warps": 4, "num_stages": 1}
    return {"num_warps": 4, "num_stages": 1, "maxnreg": 168}


def tree_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: TreeAttentionMetadata,
    params: AttentionParams,
) -> torch.Tensor:
    """Do what `tree_attention` does in plain torch, one row at a time; return f64."""
    out = torch.zeros((*q.shape[:2], v_cache.shape[2]), dtype=torch.float64, device=q.device)
    group, scales, softcap = q.shape[1] // k_cache.shape[1], params.kv_scales, params.softcap
    factors = (scales.k, scales.v) if is_fp8(k_cache) else (1.0, 1.0)
    for row, slots in seen_slots(metadata):
        k, v = (
            factor * _rows(cache, slots).repeat_interleave(group, dim=1)  # [L, Hq, d or dv]
            for cache, factor in zip((k_cache, v_cache), factors, strict=True)
        )
        scores = torch.einsum("hd,lhd->hl", q[row].double(), k) * params.scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if params.sinks is not None:
            scores = torch.cat((scores, params.sinks.double()[:, None]), dim=1)
        weights = scores.softmax(-1)[:, : len(slots)]
        out[row] = torch.einsum("hl,lhd->hd", weights, v)
    return out


def seen_slots(metadata: TreeAttentionMetadata) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield every row, padding left out, and the slots that it sees in KV-index order, [L] i32."""
    device = metadata.req_idx.device
    row_indptr = metadata.row_indptr.tolist()
    for request, prefix in enumerate(metadata.prefix_len.tolist()):
        begin, end = row_indptr[request : request + 2]
        for row in range(begin, end):
            path = metadata.path_offset[row, : metadata.path_len[row]].long()
            if metadata.is_chain[request]:
                path = torch.arange(row - begin + 1, device=device)
            seen = torch.cat((torch.arange(prefix, device=device), prefix + path))
            seen = seen[-metadata.window :]  # a window of 0 hides nothing
            req_idx = metadata.req_idx[request]
            yield row, slots_in(metadata.page_table, req_idx, seen, metadata.page_size)


def _rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return rows of a cache in float64."""
    return as_bytes(cache)[slots].view(cache.dtype).double()
