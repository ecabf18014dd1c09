"""The two kernels of tree attention: over the tiles that rows share, then over each row's own.

T rows, R requests, Hq query heads in Hkv groups of G, S states of each row and KV head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.tree_attention_tiles import (
    NOTHING,
    TOTAL_COLUMNS,
    add_tile,
    attention_of,
    chunk_begin,
    chunk_of,
    empty_state,
    first_column,
    fold,
)

_LAST = tl.constexpr(0x7FFFFFFF)
# States that are read before the first of them is folded.
_STATES_AHEAD = tl.constexpr(4)
# Where a step is not split: all shared chunks but the last, that one, and two that follow: a path of
# MAX_TREE_NODES lies in two tiles.
_SEQUENTIAL_STATES = tl.constexpr(4)


@triton.jit
def _slots(pages_ptr, logical, is_read, PAGE_SIZE: tl.constexpr):
    """Return the slots of logical slots, [TILE]; those of the sink where nothing is read."""
    page = tl.load(pages_ptr + logical // PAGE_SIZE, mask=is_read, other=0)
    return page * PAGE_SIZE + logical % PAGE_SIZE


@triton.jit
def _path_slots(
    pages_ptr, path_ptr, kv_index, prefix_len, kv_start, kv_len, PAGE_SIZE: tl.constexpr
):
    """Return the slots of KV indices of one row, gathered along its path, and which it sees."""
    is_seen = (kv_index >= kv_start) & (kv_index < kv_len)
    on_path = is_seen & (kv_index >= prefix_len)
    offset = tl.load(path_ptr + (kv_index - prefix_len), mask=on_path, other=0)
    logical = tl.where(on_path, prefix_len + offset, kv_index)
    return _slots(pages_ptr, logical, is_seen, PAGE_SIZE), is_seen


@triton.jit
def _load_tile(
    k_ptrs, v_ptrs, slot, is_read, in_dim, SLOT_STRIDE: tl.constexpr, DOT_DTYPE: tl.constexpr
):
    """Return K and V of slots, [TILE, d] each; 0 where nothing is read.

    Args:
        k_ptrs: [d], this head's K in slot 0.
        v_ptrs: [d], this head's V in slot 0.
        slot: [TILE].
        is_read: [TILE].
        in_dim: [d].
    """
    offset = slot.to(tl.int64)[:, None] * SLOT_STRIDE
    mask = is_read[:, None] & in_dim[None, :]
    k = tl.load(k_ptrs[None, :] + offset, mask=mask, other=0.0).to(DOT_DTYPE)
    v = tl.load(v_ptrs[None, :] + offset, mask=mask, other=0.0).to(DOT_DTYPE)
    return k, v


@triton.jit
def _store_state(
    stats_ptr,
    acc_ptr,
    row_offset,
    head,
    is_live,
    in_dim,
    state,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Store a state of rows x heads.

    Args:
        row_offset: [QUERIES], index of each row's state.
        head: [QUERIES], of the group.
        is_live: [QUERIES].
        in_dim: [d].
    """
    dim = tl.arange(0, in_dim.shape[0])
    index = row_offset * GROUP + head
    tl.store(stats_ptr + 2 * index, state[0], mask=is_live)
    tl.store(stats_ptr + 2 * index + 1, first_column(state[1]), mask=is_live)
    acc_ptrs = acc_ptr + index[:, None] * HEAD_DIM + dim[None, :]
    tl.store(acc_ptrs, state[2], mask=is_live[:, None] & in_dim[None, :])


@triton.jit
def _load_state(
    stats_ptr,
    acc_ptr,
    row_offset,
    head,
    is_stored,
    in_dim,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Load what `_store_state` stored of one row, or the empty state if nothing `is_stored`.

    Args:
        row_offset: Index of the row's state.
        head: [QUERIES]; past the group there is nothing.
        COLUMNS: Of the total.
    """
    is_live = head < tl.where(is_stored, GROUP, 0)
    dim = tl.arange(0, in_dim.shape[0])
    index = row_offset * GROUP + head
    largest = tl.load(stats_ptr + 2 * index, mask=is_live, other=NOTHING)
    total = tl.load(stats_ptr + 2 * index + 1, mask=is_live, other=0.0)
    total = total[:, None] + tl.zeros((1, COLUMNS), dtype=tl.float32)
    acc_ptrs = acc_ptr + index[:, None] * HEAD_DIM + dim[None, :]
    acc = tl.load(acc_ptrs, mask=is_live[:, None] & in_dim[None, :], other=0.0)
    return largest, total, acc


@triton.jit(
    do_not_specialize=["num_reqs", "page_table_stride", "num_states", "window", "num_splits"]
)
def _shared_tiles_kernel(
    q_ptr,  # [T, Hq, d]
    k_cache_ptr,  # [num_slots, Hkv, d]
    v_cache_ptr,  # [num_slots, Hkv, d]
    out_ptr,  # [T, Hq, d] mutated
    stats_ptr,  # [T, Hkv, S, G, 2] f32 mutated: largest, total
    acc_ptr,  # [T, Hkv, S, G, d] f32 mutated
    page_table_ptr,  # [max_reqs, max_pages_per_req] i32
    req_idx_ptr,  # [R] i32
    prefix_len_ptr,  # [R] i32
    row_indptr_ptr,  # [R + 1] i32
    path_len_ptr,  # [T] i32
    is_chain_ptr,  # [R] bool
    num_reqs,
    q_stride,
    page_table_stride,
    num_states,
    window,
    num_splits,
    scale,
    DOT_DTYPE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    REQ_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
):
    """Compute the states of the tiles that rows share. Grid: (any number >= row blocks, Hkv).

    A program takes a run of chunks and stores the state of each. SEQUENTIAL, it takes all of them:
    a chain's rows are done then; a tree's rows keep two states, all chunks but the last, the last.

    Args:
        num_splits: Programs per block of rows; 0: as many as there are, which only the device knows
            in a captured step.
    """
    QUERIES: tl.constexpr = ROWS * GROUP_BLOCK
    kv_head = tl.program_id(1).to(tl.int64)
    # Requests have ceil(rows / ROWS) blocks each, in order; a block has num_splits programs.
    req_lane = tl.arange(0, REQ_BLOCK)
    in_reqs = req_lane < num_reqs
    lane_begin = tl.load(row_indptr_ptr + req_lane, mask=in_reqs, other=0)
    lane_end = tl.load(row_indptr_ptr + req_lane + 1, mask=in_reqs, other=0)
    lane_blocks = (lane_end - lane_begin + ROWS - 1) // ROWS
    num_blocks = tl.maximum(tl.sum(lane_blocks, axis=0), 1)
    num_splits = tl.where(num_splits == 0, tl.num_programs(0) // num_blocks, num_splits)
    block = tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    is_before = (tl.cumsum(lane_blocks, axis=0) <= block) & in_reqs
    request = tl.sum(is_before.to(tl.int32), axis=0)
    if request >= num_reqs:
        return
    block -= tl.sum(tl.where(is_before, lane_blocks, 0), axis=0)
    row_end = tl.load(row_indptr_ptr + request + 1)
    row_begin = tl.load(row_indptr_ptr + request) + block * ROWS
    prefix_len = tl.load(prefix_len_ptr + request)
    is_chain = tl.load(is_chain_ptr + request).to(tl.int32) != 0
    pages_ptr = page_table_ptr + tl.load(req_idx_ptr + request).to(tl.int64) * page_table_stride

    query = tl.arange(0, QUERIES)  # rows x heads of the group
    row = query // GROUP_BLOCK
    head = query % GROUP_BLOCK
    in_rows = row < row_end - row_begin
    path_len = tl.load(path_len_ptr + row_begin + row, mask=in_rows, other=0)
    kv_len = tl.where(in_rows, prefix_len + path_len, 0)
    kv_start = tl.maximum(kv_len - window, 0) if HAS_WINDOW else tl.zeros_like(kv_len)
    longest = tl.max(kv_len, axis=0)
    earliest = tl.min(tl.where(in_rows, kv_start, _LAST), axis=0)

    # Tiles are split evenly, then every cut is moved down to a chunk's begin.
    first_tile = earliest // TILE
    end_tile = tl.where(is_chain, (longest + TILE - 1) // TILE, prefix_len // TILE)
    num_tiles = end_tile - first_tile
    if num_tiles <= 0:
        return
    first_chunk = chunk_of(first_tile + num_tiles * split // num_splits, CHUNK_TILES)
    end_chunk = chunk_of(first_tile + num_tiles * (split + 1) // num_splits, CHUNK_TILES)
    if split + 1 == num_splits:
        end_chunk = chunk_of(end_tile - 1, CHUNK_TILES) + 1
    if first_chunk >= end_chunk:
        return

    dim = tl.arange(0, DIM_BLOCK)
    in_dim = dim < HEAD_DIM
    is_live = in_rows & (head < GROUP)
    is_value = is_live[:, None] & in_dim[None, :]
    k_ptrs = k_cache_ptr + kv_head * HEAD_DIM + dim
    v_ptrs = v_cache_ptr + kv_head * HEAD_DIM + dim
    q_ptr += row_begin.to(tl.int64) * q_stride + kv_head * (GROUP * HEAD_DIM)
    q_offset = row * q_stride + head * HEAD_DIM
    q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=is_value, other=0.0).to(DOT_DTYPE)
    state_index = ((row_begin + row).to(tl.int64) * NUM_KV_HEADS + kv_head) * num_states

    shared_end = tl.minimum(longest, end_tile * TILE)
    state = empty_state(QUERIES, DIM_BLOCK)
    closed = empty_state(QUERIES, DIM_BLOCK)
    for chunk in range(first_chunk, end_chunk):
        if SEQUENTIAL:
            closed = fold(closed, state)
        state = empty_state(QUERIES, DIM_BLOCK)
        begin = tl.maximum(chunk_begin(chunk, CHUNK_TILES), first_tile)
        end = tl.minimum(chunk_begin(chunk + 1, CHUNK_TILES), end_tile)
        # Slots are looked up one tile ahead: loads of K and V never wait for the page table.
        kv_index = begin * TILE + tl.arange(0, TILE)
        is_read = (kv_index >= earliest) & (kv_index < shared_end)
        slot = _slots(pages_ptr, kv_index, is_read, PAGE_SIZE)
        for tile in range(begin, end):
            kv_index = tile * TILE + tl.arange(0, TILE)
            is_read = (kv_index >= earliest) & (kv_index < shared_end)
            k, v = _load_tile(
                k_ptrs, v_ptrs, slot, is_read, in_dim, NUM_KV_HEADS * HEAD_DIM, DOT_DTYPE
            )
            next_index = kv_index + TILE
            is_next = (next_index >= earliest) & (next_index < shared_end)
            slot = _slots(pages_ptr, next_index, is_next, PAGE_SIZE)

            is_visible = kv_index[None, :] < kv_len[:, None]
            if HAS_WINDOW:
                is_visible = is_visible & (kv_index[None, :] >= kv_start[:, None])
            state = add_tile(state, q, k, v, is_visible, scale)
        if not SEQUENTIAL:
            _store_state(
                stats_ptr,
                acc_ptr,
                state_index + chunk,
                head,
                is_live,
                in_dim,
                state,
                GROUP,
                HEAD_DIM,
            )

    if SEQUENTIAL:
        if is_chain:
            out = attention_of(fold(closed, state)).to(out_ptr.dtype.element_ty)
            out_ptr += (row_begin.to(tl.int64) * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
            out_offset = (row * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
            tl.store(out_ptr + out_offset[:, None] + dim[None, :], out, mask=is_value)
        else:
            _store_state(
                stats_ptr,
                acc_ptr,
                state_index,
                head,
                is_live,
                in_dim,
                closed,
                GROUP,
                HEAD_DIM,
            )
            _store_state(
                stats_ptr,
                acc_ptr,
                state_index + 1,
                head,
                is_live,
                in_dim,
                state,
                GROUP,
                HEAD_DIM,
            )


@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "page_table_stride",
        "path_offset_stride",
        "num_states",
        "window",
    ]
)
def _finish_rows_kernel(
    q_ptr,  # [T, Hq, d]
    k_cache_ptr,  # [num_slots, Hkv, d]
    v_cache_ptr,  # [num_slots, Hkv, d]
    out_ptr,  # [T, Hq, d] mutated
    stats_ptr,  # [T, Hkv, S, G, 2] f32 mutated: largest, total
    acc_ptr,  # [T, Hkv, S, G, d] f32 mutated
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
    num_states,
    window,
    scale,
    DOT_DTYPE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    REQ_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
):
    """Add, in a tree, the tiles that hold a row's own path, then fold its states. Grid: (T, Hkv).

    Padding rows get 0. SEQUENTIAL, rows of chains have their output already.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, DIM_BLOCK)
    in_dim = dim < HEAD_DIM
    group_head = tl.arange(0, GROUP_BLOCK)
    is_out = (group_head < GROUP)[:, None] & in_dim[None, :]
    out_ptr += (row * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
    out_ptrs = out_ptr + group_head[:, None] * HEAD_DIM + dim[None, :]

    req_lane = tl.arange(0, REQ_BLOCK)
    in_reqs = req_lane < num_reqs
    lane_end = tl.load(row_indptr_ptr + req_lane + 1, mask=in_reqs, other=0)
    request = tl.sum(((lane_end <= row) & in_reqs).to(tl.int32), axis=0)
    if request >= num_reqs:
        zeros = tl.zeros((GROUP_BLOCK, DIM_BLOCK), dtype=out_ptr.dtype.element_ty)
        tl.store(out_ptrs, zeros, mask=is_out)
        return
    is_chain = tl.load(is_chain_ptr + request).to(tl.int32) != 0
    if is_chain & SEQUENTIAL:
        return
    prefix_len = tl.load(prefix_len_ptr + request)
    kv_len = prefix_len + tl.load(path_len_ptr + row)
    kv_start = tl.maximum(kv_len - window, 0) if HAS_WINDOW else kv_len * 0

    # Tiles [first_tile, own_tile) are shared, [own_tile, end_tile) the row's own.
    first_tile = kv_start // TILE
    end_tile = (kv_len + TILE - 1) // TILE
    own_tile = tl.where(is_chain, end_tile, tl.maximum(prefix_len // TILE, first_tile))
    has_shared = own_tile > first_tile
    last_chunk = chunk_of(end_tile - 1, CHUNK_TILES)
    shared_chunk = chunk_of(tl.where(has_shared, own_tile - 1, own_tile), CHUNK_TILES)
    first_chunk = chunk_of(first_tile, CHUNK_TILES)
    row_states = (row * NUM_KV_HEADS + kv_head) * num_states
    if SEQUENTIAL:  # the first state is that of all chunks before the last shared one
        row_states += 1 - shared_chunk
        first_chunk = tl.where(has_shared, shared_chunk - 1, shared_chunk)

    if own_tile < end_tile:
        pages_ptr = page_table_ptr + tl.load(req_idx_ptr + request).to(tl.int64) * page_table_stride
        path_ptr = path_offset_ptr + row * path_offset_stride
        kv_index = own_tile * TILE + tl.arange(0, TILE)
        slot, is_seen = _path_slots(
            pages_ptr, path_ptr, kv_index, prefix_len, kv_start, kv_len, PAGE_SIZE
        )
        head = tl.arange(0, QUERIES)
        is_live = head < GROUP
        is_value = is_live[:, None] & in_dim[None, :]
        q_ptrs = q_ptr + row * q_stride + kv_head * (GROUP * HEAD_DIM)
        q_ptrs = q_ptrs + head[:, None] * HEAD_DIM + dim[None, :]
        q = tl.load(q_ptrs, mask=is_value, other=0.0).to(DOT_DTYPE)
        k_ptrs = k_cache_ptr + kv_head * HEAD_DIM + dim
        v_ptrs = v_cache_ptr + kv_head * HEAD_DIM + dim
        # Own tiles continue the last shared chunk, if they begin inside of it.
        chunk = chunk_of(own_tile, CHUNK_TILES)
        state = _load_state(
            stats_ptr,
            acc_ptr,
            row_states + chunk,
            head,
            has_shared & (chunk == shared_chunk),
            in_dim,
            GROUP,
            HEAD_DIM,
            TOTAL_COLUMNS,
        )
        for tile in range(own_tile, end_tile):
            k, v = _load_tile(
                k_ptrs, v_ptrs, slot, is_seen, in_dim, NUM_KV_HEADS * HEAD_DIM, DOT_DTYPE
            )
            is_visible = is_seen[None, :] & (head >= 0)[:, None]
            state = add_tile(state, q, k, v, is_visible, scale)
            chunk = chunk_of(tile, CHUNK_TILES)
            closes = tile + 1 == chunk_begin(chunk + 1, CHUNK_TILES)
            if closes | (tile + 1 == end_tile):
                _store_state(
                    stats_ptr,
                    acc_ptr,
                    row_states + chunk + head * 0,
                    head,
                    is_live,
                    in_dim,
                    state,
                    GROUP,
                    HEAD_DIM,
                )
                state = empty_state(QUERIES, DIM_BLOCK)
            kv_index += TILE
            slot, is_seen = _path_slots(
                pages_ptr, path_ptr, kv_index, prefix_len, kv_start, kv_len, PAGE_SIZE
            )
        tl.debug_barrier()  # other threads read what these stored

    folded = (
        tl.full((GROUP_BLOCK,), NOTHING, dtype=tl.float32),
        tl.zeros((GROUP_BLOCK, 1), dtype=tl.float32),
        tl.zeros((GROUP_BLOCK, DIM_BLOCK), dtype=tl.float32),
    )
    for first in range(first_chunk, last_chunk + 1, _STATES_AHEAD):
        for ahead in tl.static_range(_STATES_AHEAD):
            state = _load_state(
                stats_ptr,
                acc_ptr,
                row_states + first + ahead,
                group_head,
                first + ahead <= last_chunk,
                in_dim,
                GROUP,
                HEAD_DIM,
                1,
            )
            folded = fold(folded, state)
    out = attention_of(folded)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_out)
