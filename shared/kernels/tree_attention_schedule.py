"""What every program of tree attention does, worked out once per forward for all of its layers.

The number of requests and how their rows and contexts spread is known to the device alone when a
step is a replayed graph; a program that looked for its own part would wait for memory five times
before it loads the first K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS, count_launch, dot_dtype, use_triton
from shared.kernels.page_slots import slots_of
from shared.kernels.tree_attention_metadata import TreeAttentionMetadata
from shared.kernels.tree_attention_tiles import TRITON_KV_TILE, chunk_of, num_chunks

# Fields of a table's line, padded to a power of 2.
BLOCK_FIELDS = 16
ROW_FIELDS = 8
# Fewer requests than a warp has lanes are no reason for another binary.
_MIN_REQ_BLOCK = 32
# Lines x requests that a program compares at once.
_MOST_PAIRS = 1 << 13
# Half programs. A block worth less is better taken by one, which keeps its states to itself.
_LEAST_HALVES = tl.constexpr(5)


@triton.jit
def _shared_tiles(
    prefix_len,
    first_path,
    last_path,
    is_chain,
    window,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Return what rows of a request see together: (earliest KV index, end, first tile, end tile).

    Args:
        first_path: Path length of the first row, the shortest; 1 in a tree.
        last_path: Of the last row, the longest; 1 in a tree.
    """
    earliest = tl.maximum(prefix_len + first_path - window, 0) if HAS_WINDOW else prefix_len * 0
    end = prefix_len + last_path
    end_tile = tl.where(is_chain, (end + TILE - 1) // TILE, prefix_len // TILE)
    return earliest, tl.minimum(end, end_tile * TILE), earliest // TILE, end_tile


@triton.jit(
    do_not_specialize=["num_reqs", "num_rows", "num_programs", "num_splits", "page_table_stride"]
)
def _schedule_kernel(
    blocks_ptr,  # [P, 16] i32 mutated
    rows_ptr,  # [T, 8] i32 mutated
    req_idx_ptr,  # [R] i32
    prefix_len_ptr,  # [R] i32
    row_indptr_ptr,  # [R + 1] i32
    path_len_ptr,  # [T] i32
    is_chain_ptr,  # [R] bool
    num_reqs,
    num_rows,
    num_programs,
    num_splits,
    page_table_stride,
    window,
    TILE: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    REQ_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    BY_LENGTH: tl.constexpr,
):
    """Write LINES lines of both tables. Grid: (lines of the longer table / LINES,).

    Requests have ceil(rows / ROWS) blocks each, in order; a block has num_splits programs, or one
    per chunk if it has fewer. BY_LENGTH, num_splits programs are dealt out to blocks by their
    tiles; a block that is worth few has one. Programs for which nothing is left come last.
    """
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    lane = tl.arange(0, REQ_BLOCK)
    in_reqs = lane < num_reqs
    lane_begin = tl.load(row_indptr_ptr + lane, mask=in_reqs, other=0)
    lane_end = tl.load(row_indptr_ptr + lane + 1, mask=in_reqs, other=0)
    lane_blocks = (lane_end - lane_begin + ROWS - 1) // ROWS
    num_blocks = tl.maximum(tl.sum(lane_blocks, axis=0), 1)
    num_splits = tl.where(num_splits == 0, num_programs // num_blocks, num_splits)
    has_rows = lane_begin < lane_end
    prefix_len = tl.load(prefix_len_ptr + lane, mask=has_rows, other=0)
    is_chain = tl.load(is_chain_ptr + lane, mask=has_rows, other=0).to(tl.int32) != 0
    first_path = tl.load(path_len_ptr + lane_begin, mask=is_chain, other=1)
    last_path = tl.load(path_len_ptr + lane_end - 1, mask=is_chain, other=1)
    _, _, first_tile, end_tile = _shared_tiles(
        prefix_len, first_path, last_path, is_chain, window, TILE, HAS_WINDOW
    )
    lane_chunks = chunk_of(end_tile - 1, CHUNK_TILES) + 1 - chunk_of(first_tile, CHUNK_TILES)
    lane_chunks = tl.where(first_tile < end_tile, lane_chunks, 1)
    lane_splits = tl.minimum(lane_chunks, num_splits)
    if BY_LENGTH:
        lane_tiles = tl.maximum(end_tile - first_tile, 0)
        num_tiles = tl.maximum(tl.sum(lane_tiles * lane_blocks, axis=0), 1)
        share = lane_tiles * num_splits // num_tiles
        is_little = lane_tiles * (2 * num_splits) < num_tiles * _LEAST_HALVES
        lane_splits = tl.where(is_little, 1, tl.minimum(lane_chunks, share))
    lane_lines = lane_blocks * lane_splits

    # The request is the first whose lines end after this one.
    is_before = (tl.cumsum(lane_lines, axis=0)[None, :] <= line[:, None]) & in_reqs[None, :]
    request = tl.sum(is_before.to(tl.int32), axis=1)
    begin = tl.sum(tl.where(is_before, lane_lines[None, :], 0), axis=1)
    is_own = lane[None, :] == request[:, None]
    num_splits = tl.maximum(tl.sum(tl.where(is_own, lane_splits[None, :], 0), axis=1), 1)
    block = (line - begin) // num_splits
    split = (line - begin) % num_splits
    in_blocks = (line < num_programs) & (request < num_reqs)
    row_begin = tl.load(row_indptr_ptr + request, mask=in_blocks, other=0) + block * ROWS
    row_end = tl.load(row_indptr_ptr + request + 1, mask=in_blocks, other=0)
    row_end = tl.minimum(row_end, row_begin + ROWS)
    prefix_len = tl.load(prefix_len_ptr + request, mask=in_blocks, other=0)
    is_chain = tl.load(is_chain_ptr + request, mask=in_blocks, other=0).to(tl.int32) != 0
    req_idx = tl.load(req_idx_ptr + request, mask=in_blocks, other=0)
    first_path = tl.load(path_len_ptr + row_begin, mask=in_blocks & is_chain, other=1)
    last_path = tl.load(path_len_ptr + row_end - 1, mask=in_blocks & is_chain, other=1)
    earliest, shared_end, first_tile, end_tile = _shared_tiles(
        prefix_len, first_path, last_path, is_chain, window, TILE, HAS_WINDOW
    )
    num_tiles = end_tile - first_tile
    # A program per chunk if they suffice. Else tiles are split evenly, then every cut is moved down
    # to a chunk's begin.
    begin = chunk_of(first_tile, CHUNK_TILES)
    end = chunk_of(end_tile - 1, CHUNK_TILES) + 1
    is_enough = end - begin <= num_splits
    first_chunk = chunk_of(first_tile + num_tiles * split // num_splits, CHUNK_TILES)
    end_chunk = chunk_of(first_tile + num_tiles * (split + 1) // num_splits, CHUNK_TILES)
    end_chunk = tl.where(split + 1 == num_splits, end, end_chunk)
    first_chunk = tl.where(is_enough, begin + split, first_chunk)
    end_chunk = tl.where(is_enough, tl.minimum(begin + split + 1, end), end_chunk)
    end_chunk = tl.where(in_blocks & (num_tiles > 0), end_chunk, first_chunk)
    is_line = line < num_programs
    blocks_ptr += line * 16
    tl.store(blocks_ptr, first_chunk, mask=is_line)
    tl.store(blocks_ptr + 1, end_chunk, mask=is_line)
    tl.store(blocks_ptr + 2, first_tile, mask=is_line)
    tl.store(blocks_ptr + 3, end_tile, mask=is_line)
    tl.store(blocks_ptr + 4, earliest, mask=is_line)
    tl.store(blocks_ptr + 5, shared_end, mask=is_line)
    tl.store(blocks_ptr + 6, row_begin, mask=is_line)
    tl.store(blocks_ptr + 7, row_end, mask=is_line)
    tl.store(blocks_ptr + 8, req_idx * page_table_stride, mask=is_line)
    tl.store(blocks_ptr + 9, is_chain.to(tl.int32), mask=is_line)
    tl.store(blocks_ptr + 10, (num_splits == 1).to(tl.int32), mask=is_line)

    # Rows: tiles [first, own) are shared, [own, end) the row's own.
    is_line = line < num_rows
    is_before = (lane_end[None, :] <= line[:, None]) & in_reqs[None, :]
    request = tl.sum(is_before.to(tl.int32), axis=1)
    is_own = lane[None, :] == request[:, None]
    is_whole = tl.sum(tl.where(is_own, lane_splits[None, :], 0), axis=1) == 1
    in_rows = is_line & (request < num_reqs)
    prefix_len = tl.load(prefix_len_ptr + request, mask=in_rows, other=0)
    is_chain = tl.load(is_chain_ptr + request, mask=in_rows, other=0).to(tl.int32) != 0
    req_idx = tl.load(req_idx_ptr + request, mask=in_rows, other=0)
    kv_len = prefix_len + tl.load(path_len_ptr + line, mask=in_rows, other=0)
    kv_start = tl.maximum(kv_len - window, 0) if HAS_WINDOW else tl.zeros_like(kv_len)
    first_tile = kv_start // TILE
    end_tile = (kv_len + TILE - 1) // TILE
    own_tile = tl.maximum(prefix_len // TILE, first_tile)
    own_tile = tl.where(is_chain | ~in_rows, end_tile, own_tile)
    rows_ptr += line * 8
    tl.store(rows_ptr, kv_len, mask=is_line)
    tl.store(rows_ptr + 1, kv_start, mask=is_line)
    tl.store(rows_ptr + 2, first_tile, mask=is_line)
    tl.store(rows_ptr + 3, own_tile, mask=is_line)
    tl.store(rows_ptr + 4, end_tile, mask=is_line)
    tl.store(rows_ptr + 5, is_chain.to(tl.int32) + 2 * is_whole.to(tl.int32), mask=is_line)
    tl.store(rows_ptr + 6, prefix_len, mask=is_line)
    tl.store(rows_ptr + 7, req_idx * page_table_stride, mask=is_line)


@triton.jit(do_not_specialize=["path_offset_stride"])
def _own_slots_kernel(
    slots_ptr,  # [T, SLOTS] i32 mutated
    rows_ptr,  # [T, 8] i32
    page_table_ptr,  # [max_reqs, max_pages_per_req] i32
    path_offset_ptr,  # [T, D] i32
    path_offset_stride,
    TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Look the slots of a row's own tiles up, along its path. Grid: (T,).

    What it does not see is replaced by something that it does: finite, unless the row is not.
    """
    row = tl.program_id(0).to(tl.int64)
    rows_ptr += row * 8
    kv_len = tl.load(rows_ptr)
    kv_start = tl.load(rows_ptr + 1)
    own_tile = tl.load(rows_ptr + 3)
    has_own = own_tile < tl.load(rows_ptr + 4)
    prefix_len = tl.load(rows_ptr + 6)
    pages_ptr = page_table_ptr + tl.load(rows_ptr + 7)
    index = tl.arange(0, BLOCK)
    seen = tl.minimum(tl.maximum(own_tile * TILE + index, kv_start), tl.maximum(kv_len - 1, 0))
    on_path = (seen >= prefix_len) & has_own
    offset_ptrs = path_offset_ptr + row * path_offset_stride + (seen - prefix_len)
    offset = tl.load(offset_ptrs, mask=on_path, other=0)
    logical = tl.where(on_path, prefix_len + offset, seen)
    slot = slots_of(pages_ptr, tl.where(has_own, logical, 0), PAGE_SIZE)
    tl.store(slots_ptr + row * SLOTS + index, slot, mask=index < SLOTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How the work of an attention is cut into programs.

    Args:
        rows: Rows of a request that a program takes at most.
        num_programs: Per KV head; at least as many as there are blocks of rows.
        num_splits: Programs per block of rows; 0: as many as there are.
        max_chunks: Chunks of the longest context.
        chunk_tiles: Tiles of the shortest chunks.
        is_sequential: A program takes all chunks of its rows; by length it may.
        by_length: `num_splits` are dealt out to all blocks, by their tiles.
    """

    rows: int
    num_programs: int
    num_splits: int
    max_chunks: int
    chunk_tiles: int
    is_sequential: bool
    by_length: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether every program takes all chunks of its rows."""
        return self.is_sequential and not self.by_length


def cut_work(
    metadata: TreeAttentionMetadata,
    *,
    rows: int,
    chunk_tiles: int,
    num_splits: int | None,
    wanted: int,
    is_small: Callable[[int, int], bool],
) -> Cut:
    """Cut the work of an attention.

    Args:
        num_splits: Programs per block of rows, whatever the rows; 0: one, which takes all chunks;
            None: as many as are wanted if the work is small, else one.
        wanted: Programs per KV head.
        is_small: Whether so many blocks of rows, at most, and chunks are to be split.
    """
    num_rows, num_reqs = metadata.path_len.shape[0], metadata.req_idx.shape[0]
    max_chunks = num_chunks(metadata.page_table.shape[1] * metadata.page_size, chunk_tiles)
    # Never fewer programs than blocks of rows, and no read-back of how many those are.
    num_programs = min(num_rows, num_rows // rows + num_reqs)
    is_sequential = num_splits == 0
    if num_splits is None:
        is_sequential = not is_small(num_programs, max_chunks)
    if num_splits:
        num_programs *= num_splits
    elif not is_sequential:
        num_programs = min(num_programs * max_chunks, max(num_programs, wanted))
    return Cut(
        rows=rows,
        num_programs=num_programs,
        num_splits=1 if is_sequential else num_splits or 0,
        max_chunks=max_chunks,
        chunk_tiles=chunk_tiles,
        is_sequential=is_sequential,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Tables of an attention, the same ones for every layer of a forward.

    Args:
        blocks: [num_programs, 16] i32, fields as `_schedule_kernel` writes them.
        rows: [T, 8] i32, likewise.
        own_slots: [T, most own tiles * TILE] i32, see `_own_slots_kernel`.
    """

    blocks: torch.Tensor
    rows: torch.Tensor
    own_slots: torch.Tensor


def schedule(metadata: TreeAttentionMetadata, cut: Cut) -> Schedule:
    """Work out, at the first layer of a forward, what every program does.

    Mutates: `metadata.plans`.
    """
    if cut in metadata.plans:
        return metadata.plans[cut]
    num_reqs, num_rows = metadata.req_idx.shape[0], metadata.path_len.shape[0]
    num_programs = cut.num_programs
    device = metadata.req_idx.device
    blocks = torch.empty((num_programs, BLOCK_FIELDS), dtype=torch.int32, device=device)
    rows = torch.empty((num_rows, ROW_FIELDS), dtype=torch.int32, device=device)
    req_block = max(_MIN_REQ_BLOCK, triton.next_power_of_2(num_reqs))
    lines = max(16, min(128, _MOST_PAIRS // req_block))
    count_launch("tree_attention_schedule")
    _schedule_kernel[(triton.cdiv(max(num_programs, num_rows), lines),)](
        blocks,
        rows,
        metadata.req_idx,
        metadata.prefix_len,
        metadata.row_indptr,
        metadata.path_len,
        metadata.is_chain,
        num_reqs,
        num_rows,
        num_programs,
        cut.num_splits,
        metadata.page_table.stride(0),
        metadata.window,
        TILE=TRITON_KV_TILE,
        CHUNK_TILES=cut.chunk_tiles,
        REQ_BLOCK=req_block,
        HAS_WINDOW=metadata.window > 0,
        ROWS=cut.rows,
        LINES=lines,
        BY_LENGTH=cut.by_length,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )
    most_own = triton.cdiv(TRITON_KV_TILE - 1 + metadata.path_offset.shape[1], TRITON_KV_TILE)
    num_slots = TRITON_KV_TILE * most_own
    own_slots = torch.empty((num_rows, num_slots), dtype=torch.int32, device=device)
    _own_slots_kernel[(num_rows,)](
        own_slots,
        rows,
        metadata.page_table,
        metadata.path_offset,
        metadata.path_offset.stride(0),
        TILE=TRITON_KV_TILE,
        PAGE_SIZE=metadata.page_size,
        SLOTS=num_slots,
        BLOCK=triton.next_power_of_2(num_slots),
        num_warps=1,
        **LAUNCH_OPTIONS,
    )
    metadata.plans[cut] = Schedule(blocks=blocks, rows=rows, own_slots=own_slots)
    return metadata.plans[cut]


def with_schedule(
    metadata: TreeAttentionMetadata,
    q_dtype: torch.dtype,
    cut: Callable[[TreeAttentionMetadata, tl.dtype], Cut],
) -> TreeAttentionMetadata:
    """Return the metadata of one forward, with its schedule if kernels will run.

    Args:
        cut: Of the metadata and the dtype of products.
    """
    # A captured forward computes it anew at every replay: nothing of an earlier one may be kept.
    metadata = replace(metadata)
    has_rows = metadata.path_len.shape[0] and metadata.req_idx.shape[0]
    if use_triton(metadata.req_idx) and has_rows:
        schedule(metadata, cut(metadata, dot_dtype(metadata.req_idx.new_empty(0, dtype=q_dtype))))
    return metadata
