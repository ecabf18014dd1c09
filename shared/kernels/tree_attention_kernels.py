"""The two kernels of tree attention: over the tiles that rows share, then over each row's own.

T rows, P programs per KV head, Hq query heads in Hkv groups of G, S states of each row and KV head.
Heads of V have dv values, mostly as many as those of K, d.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.dependent_launch import wait_for_previous
from shared.kernels.page_slots import slots_of
from shared.kernels.quantized import from_e4m3
from shared.kernels.tree_attention_tiles import (
    add_sink,
    add_tile,
    attention_of,
    chunk_begin,
    chunk_of,
    empty_state,
    fold,
    load_state,
    store_state,
)

# States that are read before the first of them is folded.
_STATES_AHEAD = tl.constexpr(4)
# Where a step is not split: all shared chunks but the last, that one, and two that follow it, as a
# path of MAX_TREE_NODES lies in two tiles.
_SEQUENTIAL_STATES = tl.constexpr(4)


@triton.jit
def _load_rows(
    ptr,
    slot,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    is_wanted,
):
    """Return a head's rows of a cache, [TILE, BLOCK]; see `_load_tile`."""
    dim = tl.arange(0, BLOCK)
    offset = slot.to(tl.int64)[:, None] * (NUM_KV_HEADS * WIDTH) + dim[None, :]
    if WIDTH == BLOCK:
        rows = tl.load(ptr + offset, mask=is_wanted)
    else:
        mask = (slot >= 0)[:, None] & (dim < WIDTH)[None, :]
        if is_wanted is not None:
            mask = mask & is_wanted
        rows = tl.load(ptr + offset, mask=mask, other=0.0)
    return rows


@triton.jit
def _load_tile(
    k_ptr,
    v_ptr,
    slot,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    is_wanted=None,
):
    """Return K [TILE, d] and V [TILE, dv] of slots, as the caches have them: FP8 unscaled.

    Args:
        k_ptr: This head's K in slot 0.
        v_ptr: This head's V in slot 0.
        slot: [TILE].
        is_wanted: False: nothing is loaded, and what is returned is undefined.
    """
    k = _load_rows(k_ptr, slot, NUM_KV_HEADS, HEAD_DIM, DIM_BLOCK, is_wanted)
    v = _load_rows(v_ptr, slot, NUM_KV_HEADS, V_DIM, V_BLOCK, is_wanted)
    if k_ptr.dtype.element_ty == tl.uint8:
        k, v = from_e4m3(k, DOT_DTYPE), from_e4m3(v, DOT_DTYPE)
    return k.to(DOT_DTYPE), v.to(DOT_DTYPE)


@triton.jit
def _scaled(out, v_scale):
    """Return means of V in FP8 times its scale; others as they are."""
    if v_scale is not None:
        out = out * v_scale
    return out


@triton.jit
def _load_sink(sinks_ptr, kv_head, head, GROUP: tl.constexpr):
    """Return the sinks of heads of a group; 0 past it."""
    return tl.load(sinks_ptr + kv_head * GROUP + head, mask=head < GROUP, other=0.0)


@triton.jit(do_not_specialize=["num_states"])
def _shared_tiles_kernel(
    q_ptr,  # [T, Hq, d]
    k_cache_ptr,  # [num_slots, Hkv, d]; of FP8 u8
    v_cache_ptr,  # [num_slots, Hkv, dv]; of FP8 u8
    sinks_ptr,  # [Hq] f32, unread unless HAS_SINKS
    out_ptr,  # [T, Hq, dv] mutated
    stats_ptr,  # [T, Hkv, S, G, 2] f32 mutated: largest, total
    acc_ptr,  # [T, Hkv, S, G, dv] f32 mutated
    page_table_ptr,  # [max_reqs, max_pages_per_req] i32
    blocks_ptr,  # [P, 16] i32, see `schedule`
    rows_ptr,  # [T, 8] i32, likewise
    q_stride,
    num_states,
    scale,
    inner_scale,
    v_scale,  # of V in FP8, else None
    DOT_DTYPE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Compute the states of the tiles that rows share. Grid: (Hkv, P).

    A program takes a run of chunks and stores the state of each. SEQUENTIAL, it may take all of
    them: a chain's rows are done then; a tree's rows keep two states, all chunks but the last, and
    the last.
    """
    QUERIES: tl.constexpr = ROWS * GROUP_BLOCK
    kv_head = tl.program_id(0).to(tl.int64)
    blocks_ptr += tl.program_id(1) * 16
    first_chunk = tl.load(blocks_ptr)
    end_chunk = tl.load(blocks_ptr + 1)
    first_tile = tl.load(blocks_ptr + 2)
    end_tile = tl.load(blocks_ptr + 3)
    earliest = tl.load(blocks_ptr + 4)
    shared_end = tl.load(blocks_ptr + 5)
    row_begin = tl.load(blocks_ptr + 6)
    row_end = tl.load(blocks_ptr + 7)
    pages_ptr = page_table_ptr + tl.load(blocks_ptr + 8)
    is_chain = tl.load(blocks_ptr + 9) != 0
    is_whole = (tl.load(blocks_ptr + 10) != 0) & SEQUENTIAL

    query = tl.arange(0, QUERIES)  # rows x heads of the group
    row = query // GROUP_BLOCK
    head = query % GROUP_BLOCK
    in_rows = row < row_end - row_begin
    kv_len = tl.load(rows_ptr + (row_begin + row) * 8, mask=in_rows, other=0)
    kv_start = tl.load(rows_ptr + (row_begin + row) * 8 + 1, mask=in_rows, other=0)
    k_cache_ptr += kv_head * HEAD_DIM
    v_cache_ptr += kv_head * V_DIM
    # Slots are looked up one tile ahead: loads of K and V never wait for the page table. What no
    # row sees is replaced by something that one does.
    last_seen = tl.maximum(shared_end - 1, 0)
    begin = tl.maximum(chunk_begin(first_chunk, CHUNK_TILES), first_tile)
    kv_index = begin * TILE + tl.arange(0, TILE)
    slot = slots_of(pages_ptr, tl.minimum(tl.maximum(kv_index, earliest), last_seen), PAGE_SIZE)
    wait_for_previous(IS_DEPENDENT)
    if first_chunk >= end_chunk:
        return

    dim = tl.arange(0, DIM_BLOCK)
    in_dim = dim < HEAD_DIM
    is_live = in_rows & (head < GROUP)
    is_value = is_live[:, None] & in_dim[None, :]
    q_ptr += row_begin.to(tl.int64) * q_stride + kv_head * (GROUP * HEAD_DIM)
    q_offset = row * q_stride + head * HEAD_DIM
    q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=is_value, other=0.0).to(DOT_DTYPE)
    state_index = ((row_begin + row).to(tl.int64) * NUM_KV_HEADS + kv_head) * num_states

    state = empty_state(QUERIES, V_BLOCK)
    closed = empty_state(QUERIES, V_BLOCK)
    for chunk in range(first_chunk, end_chunk):
        if SEQUENTIAL:
            closed = fold(closed, state)
        state = empty_state(QUERIES, V_BLOCK)
        begin = tl.maximum(chunk_begin(chunk, CHUNK_TILES), first_tile)
        end = tl.minimum(chunk_begin(chunk + 1, CHUNK_TILES), end_tile)
        for _ in range(begin, end):
            k, v = _load_tile(
                k_cache_ptr,
                v_cache_ptr,
                slot,
                NUM_KV_HEADS,
                HEAD_DIM,
                DIM_BLOCK,
                V_DIM,
                V_BLOCK,
                DOT_DTYPE,
            )
            seen = tl.minimum(tl.maximum(kv_index + TILE, earliest), last_seen)
            slot = slots_of(pages_ptr, seen, PAGE_SIZE)

            is_visible = kv_index[None, :] < kv_len[:, None]
            if HAS_WINDOW:
                is_visible = is_visible & (kv_index[None, :] >= kv_start[:, None])
            state = add_tile(state, q, k, v, is_visible, scale, inner_scale, HAS_SOFTCAP)
            kv_index += TILE
        if not is_whole:
            index = (state_index + chunk) * GROUP + head
            store_state(stats_ptr, acc_ptr, index, is_live, state, V_DIM)

    if is_whole:
        if is_chain:
            folded = fold(closed, state)
            if HAS_SINKS:
                folded = add_sink(folded, _load_sink(sinks_ptr, kv_head, head, GROUP))
            out = _scaled(attention_of(folded), v_scale).to(out_ptr.dtype.element_ty)
            out_ptr += (row_begin.to(tl.int64) * NUM_KV_HEADS + kv_head) * (GROUP * V_DIM)
            out_offset = (row * (NUM_KV_HEADS * GROUP) + head) * V_DIM
            v_dim = tl.arange(0, V_BLOCK)
            is_out = is_live[:, None] & (v_dim < V_DIM)[None, :]
            tl.store(out_ptr + out_offset[:, None] + v_dim[None, :], out, mask=is_out)
        else:
            index = state_index * GROUP + head
            store_state(stats_ptr, acc_ptr, index, is_live, closed, V_DIM)
            store_state(stats_ptr, acc_ptr, index + GROUP, is_live, state, V_DIM)


@triton.jit(do_not_specialize=["num_states"])
def _finish_rows_kernel(
    q_ptr,  # [T, Hq, d]
    k_cache_ptr,  # [num_slots, Hkv, d]; of FP8 u8
    v_cache_ptr,  # [num_slots, Hkv, dv]; of FP8 u8
    sinks_ptr,  # [Hq] f32, unread unless HAS_SINKS
    out_ptr,  # [T, Hq, dv] mutated
    stats_ptr,  # [T, Hkv, S, G, 2] f32 mutated: largest, total
    acc_ptr,  # [T, Hkv, S, G, dv] f32 mutated
    own_slots_ptr,  # [T, OWN_SLOTS] i32, see `schedule`
    rows_ptr,  # [T, 8] i32, likewise
    q_stride,
    num_states,
    scale,
    inner_scale,
    v_scale,  # of V in FP8, else None
    DOT_DTYPE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    OWN_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    QUERIES: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Add, in a tree, the tiles that hold a row's own path, then fold its states. Grid: (T, Hkv).

    Padding rows get 0. SEQUENTIAL, rows of chains whose chunks one program took have their output
    already.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    rows_ptr += row * 8
    kv_len = tl.load(rows_ptr)
    kv_start = tl.load(rows_ptr + 1)
    # Tiles [first_tile, own_tile) are shared, [own_tile, end_tile) the row's own.
    first_tile = tl.load(rows_ptr + 2)
    own_tile = tl.load(rows_ptr + 3)
    end_tile = tl.load(rows_ptr + 4)
    kind = tl.load(rows_ptr + 5)
    is_chain = kind % 2 != 0
    is_whole = (kind >= 2) & SEQUENTIAL

    has_shared = own_tile > first_tile
    last_chunk = chunk_of(end_tile - 1, CHUNK_TILES)
    shared_chunk = chunk_of(tl.where(has_shared, own_tile - 1, own_tile), CHUNK_TILES)
    first_chunk = chunk_of(first_tile, CHUNK_TILES)
    row_states = (row * NUM_KV_HEADS + kv_head) * num_states
    if is_whole:  # the first state is that of all chunks before the last shared one
        row_states += 1 - shared_chunk
        first_chunk = tl.where(has_shared, shared_chunk - 1, shared_chunk)

    dim = tl.arange(0, DIM_BLOCK)
    in_dim = dim < HEAD_DIM
    v_dim = tl.arange(0, V_BLOCK)
    has_path = own_tile < end_tile
    head = tl.arange(0, QUERIES)
    is_live = head < GROUP
    is_value = is_live[:, None] & in_dim[None, :]
    q_ptr += row * q_stride + kv_head * (GROUP * HEAD_DIM)
    k_cache_ptr += kv_head * HEAD_DIM
    v_cache_ptr += kv_head * V_DIM
    kv_index = own_tile * TILE + tl.arange(0, TILE)
    slots_ptr = own_slots_ptr + row * OWN_SLOTS + tl.arange(0, TILE)
    # Of these nothing is the work of the kernel before.
    k, v = _load_tile(
        k_cache_ptr,
        v_cache_ptr,
        tl.load(slots_ptr),
        NUM_KV_HEADS,
        HEAD_DIM,
        DIM_BLOCK,
        V_DIM,
        V_BLOCK,
        DOT_DTYPE,
        has_path,
    )
    q_ptrs = q_ptr + head[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptrs, mask=is_value & has_path, other=0.0).to(DOT_DTYPE)
    wait_for_previous(IS_DEPENDENT)
    if has_path:
        # Own tiles continue the last shared chunk, if they begin inside of it.
        chunk = chunk_of(own_tile, CHUNK_TILES)
        continues = has_shared & (chunk == shared_chunk)
        index = (row_states + chunk) * GROUP + head
        is_stored = head < tl.where(continues, GROUP, 0)
        state = load_state(stats_ptr, acc_ptr, index, v_dim, is_stored, V_DIM)
        for tile in range(own_tile, end_tile):
            if tile > own_tile:
                k, v = _load_tile(
                    k_cache_ptr,
                    v_cache_ptr,
                    tl.load(slots_ptr + (tile - own_tile) * TILE),
                    NUM_KV_HEADS,
                    HEAD_DIM,
                    DIM_BLOCK,
                    V_DIM,
                    V_BLOCK,
                    DOT_DTYPE,
                )
            is_seen = (kv_index >= kv_start) & (kv_index < kv_len)
            is_visible = (head >= 0)[:, None] & is_seen[None, :]
            state = add_tile(state, q, k, v, is_visible, scale, inner_scale, HAS_SOFTCAP)
            chunk = chunk_of(tile, CHUNK_TILES)
            closes = tile + 1 == chunk_begin(chunk + 1, CHUNK_TILES)
            if closes | (tile + 1 == end_tile):
                index = (row_states + chunk) * GROUP + head
                store_state(stats_ptr, acc_ptr, index, is_live, state, V_DIM)
                state = empty_state(QUERIES, V_BLOCK)
            kv_index += TILE
        tl.debug_barrier()  # other threads read what these stored
    elif is_chain & is_whole:
        return

    head = tl.arange(0, GROUP_BLOCK)
    folded = empty_state(GROUP_BLOCK, V_BLOCK)
    end_chunk = tl.where(kv_len > 0, last_chunk + 1, first_chunk)
    for first in range(first_chunk, end_chunk, _STATES_AHEAD):
        for ahead in tl.static_range(_STATES_AHEAD):
            index = (row_states + first + ahead) * GROUP + head
            is_stored = head < tl.where(first + ahead < end_chunk, GROUP, 0)
            state = load_state(stats_ptr, acc_ptr, index, v_dim, is_stored, V_DIM)
            folded = fold(folded, state)
    if HAS_SINKS:
        folded = add_sink(folded, _load_sink(sinks_ptr, kv_head, head, GROUP))
    out = _scaled(attention_of(folded), v_scale)
    is_out = (head < GROUP)[:, None] & (v_dim < V_DIM)[None, :]
    out_ptr += (row * NUM_KV_HEADS + kv_head) * (GROUP * V_DIM)
    out_ptrs = out_ptr + head[:, None] * V_DIM + v_dim[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_out)
