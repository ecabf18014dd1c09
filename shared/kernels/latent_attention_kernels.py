"""The two kernels of latent attention: over the tiles that rows share, then over each row's own.

T rows, Hq query heads in G groups of H heads, P programs per group, S states of each row and group.
A row of the cache is a key; its first `VALUE` values are the value, the rest is its tail. States
are wide: none is held in registers beside another one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.dependent_launch import wait_for_previous
from shared.kernels.page_slots import slots_of
from shared.kernels.tree_attention_tiles import (
    attention_of,
    chunk_begin,
    chunk_of,
    empty_state,
    fold,
    load_acc,
    load_state,
    load_stats,
    store_state,
    weigh,
)

# States that are read before the first of them is folded.
_STATES_AHEAD = tl.constexpr(3)


@triton.jit
def _load_columns(
    rows_ptr,
    offset,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    is_wanted,
):
    """Return values [FIRST, FIRST + WIDTH) of rows, and zeros beside them. [rows, BLOCK]

    Args:
        offset: Of each row, i64 [rows].
        is_wanted: [rows]; False: zeros.
    """
    column = tl.arange(0, BLOCK)
    mask = is_wanted[:, None] & (column < WIDTH)[None, :]
    pointers = rows_ptr + offset[:, None] + (FIRST + column)[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(DOT_DTYPE)


@triton.jit
def _load_tile(
    cache_ptr,
    slot,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Return the values and the tails of slots, [TILE, VALUE_BLOCK] and [TILE, TAIL_BLOCK]."""
    offset = slot.to(tl.int64) * (VALUE + TAIL)
    is_wanted = slot >= 0
    value = _load_columns(cache_ptr, offset, 0, VALUE, VALUE_BLOCK, DOT_DTYPE, is_wanted)
    tail = _load_columns(cache_ptr, offset, VALUE, TAIL, TAIL_BLOCK, DOT_DTYPE, is_wanted)
    return value, tail


@triton.jit
def _scores(q_value, q_tail, value, tail):
    """Return the products of queries and keys, [QUERIES, TILE]; the tail is added last."""
    scores = tl.dot(q_value, tl.trans(value), input_precision="ieee")
    return tl.dot(q_tail, tl.trans(tail), scores, input_precision="ieee")


@triton.jit
def sum_of_halves(weights):
    """Return the sums of weights, [QUERIES, 64]: of each half in pairs 16 apart, 8 and so on, and
    the two halves last, which are those of two warpgroups.
    """
    QUERIES: tl.constexpr = weights.shape[0]
    pairs = tl.sum(tl.reshape(weights, (QUERIES, 2, 2, 16)), axis=2)
    pairs = tl.sum(tl.reshape(pairs, (QUERIES, 2, 2, 8)), axis=2)
    pairs = tl.sum(tl.reshape(pairs, (QUERIES, 2, 2, 4)), axis=2)
    pairs = tl.sum(tl.reshape(pairs, (QUERIES, 2, 2, 2)), axis=2)
    halves = tl.sum(pairs, axis=2)
    return tl.sum(halves, axis=1)


@triton.jit
def _add_scores(state, scores, value, is_visible, scale):
    """Do what `add_scores` of tree attention does, but for the order in which weights are added."""
    largest, factor, weights = weigh(state[0], scores, is_visible, scale)
    total = tl.fma(state[1], factor, sum_of_halves(weights))
    acc = state[2] * factor[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    return largest, total, acc


@triton.jit
def _fold_in_memory(
    stats_ptr,
    acc_ptr,
    index,
    following,
    is_live,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Fold states into those before them, some columns at a time.

    Args:
        index: Of the states before, i64 [QUERIES].
        following: Of the others.
    """
    tl.debug_barrier()  # other threads stored what these load
    largest, total = load_stats(stats_ptr, index, is_live)
    other_largest, other_total = load_stats(stats_ptr, following, is_live)
    tl.debug_barrier()
    for first in range(0, VALUE_BLOCK, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        acc = load_acc(acc_ptr, index, column, is_live, VALUE)
        other = load_acc(acc_ptr, following, column, is_live, VALUE)
        folded = fold((largest, total, acc), (other_largest, other_total, other))
        acc_ptrs = acc_ptr + index[:, None] * VALUE + column[None, :]
        tl.store(acc_ptrs, folded[2], mask=is_live[:, None] & (column < VALUE)[None, :])
        tl.store(stats_ptr + 2 * index, folded[0], mask=is_live)
        tl.store(stats_ptr + 2 * index + 1, folded[1], mask=is_live)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_states"])
def _shared_latents_kernel(
    q_ptr,  # [T, Hq, VALUE + TAIL]
    cache_ptr,  # [num_slots, VALUE + TAIL]
    stats_ptr,  # [T, G, S, H, 2] f32 mutated: largest, total
    acc_ptr,  # [T, G, S, H, VALUE] f32 mutated
    page_table_ptr,  # [max_reqs, max_pages_per_req] i32
    blocks_ptr,  # [P, 16] i32, see `schedule`
    rows_ptr,  # [T, 8] i32, likewise
    num_states,
    scale,
    DOT_DTYPE: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Compute the states of the tiles that rows share. Grid: (G, P).

    A program takes a run of chunks and stores the state of each. SEQUENTIAL, it takes all of them
    and stores two states: all chunks but the last, the last.
    """
    QUERIES: tl.constexpr = ROWS * HEADS_BLOCK
    WIDTH: tl.constexpr = VALUE + TAIL
    group = tl.program_id(0).to(tl.int64)
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

    query = tl.arange(0, QUERIES)  # rows x heads of the group
    row = query // HEADS_BLOCK
    head = query % HEADS_BLOCK
    in_rows = row < row_end - row_begin
    kv_len = tl.load(rows_ptr + (row_begin + row) * 8, mask=in_rows, other=0)
    kv_start = tl.load(rows_ptr + (row_begin + row) * 8 + 1, mask=in_rows, other=0)
    # Slots are looked up one tile ahead: loads of keys never wait for the page table. What no row
    # sees is replaced by something that one does.
    last_seen = tl.maximum(shared_end - 1, 0)
    begin = tl.maximum(chunk_begin(first_chunk, CHUNK_TILES), first_tile)
    kv_index = begin * TILE + tl.arange(0, TILE)
    slot = slots_of(pages_ptr, tl.minimum(tl.maximum(kv_index, earliest), last_seen), PAGE_SIZE)
    wait_for_previous(IS_DEPENDENT)
    if first_chunk >= end_chunk:
        return

    is_live = in_rows & (head < HEADS)
    q_row = (row_begin + row).to(tl.int64) * GROUPS + group
    q_offset = (q_row * HEADS + head) * WIDTH
    q_value = _load_columns(q_ptr, q_offset, 0, VALUE, VALUE_BLOCK, DOT_DTYPE, is_live)
    q_tail = _load_columns(q_ptr, q_offset, VALUE, TAIL, TAIL_BLOCK, DOT_DTYPE, is_live)
    state_index = q_row * num_states
    if SEQUENTIAL:
        empty = empty_state(QUERIES, VALUE_BLOCK)
        store_state(stats_ptr, acc_ptr, state_index * HEADS + head, is_live, empty, VALUE)
    for chunk in range(first_chunk, end_chunk):
        if SEQUENTIAL:
            if chunk > first_chunk:
                _fold_in_memory(
                    stats_ptr,
                    acc_ptr,
                    state_index * HEADS + head,
                    (state_index + 1) * HEADS + head,
                    is_live,
                    VALUE,
                    VALUE_BLOCK,
                    COLUMNS,
                )
        state = empty_state(QUERIES, VALUE_BLOCK)
        begin = tl.maximum(chunk_begin(chunk, CHUNK_TILES), first_tile)
        end = tl.minimum(chunk_begin(chunk + 1, CHUNK_TILES), end_tile)
        for _ in range(begin, end):
            value, tail = _load_tile(
                cache_ptr, slot, VALUE, VALUE_BLOCK, TAIL, TAIL_BLOCK, DOT_DTYPE
            )
            seen = tl.minimum(tl.maximum(kv_index + TILE, earliest), last_seen)
            slot = slots_of(pages_ptr, seen, PAGE_SIZE)

            is_visible = kv_index[None, :] < kv_len[:, None]
            if HAS_WINDOW:
                is_visible = is_visible & (kv_index[None, :] >= kv_start[:, None])
            scores = _scores(q_value, q_tail, value, tail)
            state = _add_scores(state, scores, value, is_visible, scale)
            kv_index += TILE
        place = state_index + (1 if SEQUENTIAL else chunk)
        store_state(stats_ptr, acc_ptr, place * HEADS + head, is_live, state, VALUE)


@triton.jit(do_not_specialize=["num_states"])
def _finish_latents_kernel(
    q_ptr,  # [T, Hq, VALUE + TAIL]
    cache_ptr,  # [num_slots, VALUE + TAIL]
    out_ptr,  # [T, Hq, VALUE] mutated
    stats_ptr,  # [T, G, S, H, 2] f32: largest, total
    acc_ptr,  # [T, G, S, H, VALUE] f32
    own_slots_ptr,  # [T, OWN_SLOTS] i32, see `schedule`
    rows_ptr,  # [T, 8] i32, likewise
    num_states,
    scale,
    DOT_DTYPE: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    OWN_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Fold a row's states, and in a tree the tiles that hold its own path.

    Grid: (T, G * ceil(H / QUERIES), VALUE_BLOCK / COLUMNS): a program has some heads of a group and
    some columns of the values. Padding rows get 0.
    """
    PARTS: tl.constexpr = (HEADS + QUERIES - 1) // QUERIES
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) // PARTS
    first_head = tl.program_id(1) % PARTS * QUERIES
    first_column = tl.program_id(2) * COLUMNS
    rows_ptr += row * 8
    kv_len = tl.load(rows_ptr)
    kv_start = tl.load(rows_ptr + 1)
    # Tiles [first_tile, own_tile) are shared, [own_tile, end_tile) the row's own.
    first_tile = tl.load(rows_ptr + 2)
    own_tile = tl.load(rows_ptr + 3)
    end_tile = tl.load(rows_ptr + 4)
    has_shared = own_tile > first_tile
    shared_chunk = chunk_of(tl.where(has_shared, own_tile - 1, own_tile), CHUNK_TILES)
    first_chunk = chunk_of(first_tile, CHUNK_TILES)
    head = first_head + tl.arange(0, QUERIES)
    q_row = row * GROUPS + group
    state_index = q_row * num_states
    if SEQUENTIAL:  # the first state is that of all chunks before the last shared one
        state_index += 1 - shared_chunk
        first_chunk = shared_chunk - 1
    # Own tiles continue the last shared chunk, if they begin inside of it.
    has_own = own_tile < end_tile
    continues = has_shared & has_own & (chunk_of(own_tile, CHUNK_TILES) == shared_chunk)
    end_chunk = tl.where(continues, shared_chunk, shared_chunk + 1)
    end_chunk = tl.where(has_shared, end_chunk, first_chunk)

    kv_index = own_tile * TILE + tl.arange(0, TILE)
    slots_ptr = own_slots_ptr + row * OWN_SLOTS + tl.arange(0, TILE)
    wait_for_previous(IS_DEPENDENT)
    is_live = head < HEADS
    column = first_column + tl.arange(0, COLUMNS)
    folded = empty_state(QUERIES, COLUMNS)
    for first in range(first_chunk, end_chunk, _STATES_AHEAD):
        for ahead in tl.static_range(_STATES_AHEAD):
            index = (state_index + first + ahead) * HEADS + head
            is_stored = is_live & (first + ahead < end_chunk)
            state = load_state(stats_ptr, acc_ptr, index, column, is_stored, VALUE)
            folded = fold(folded, state)
    if has_own:
        q_offset = (q_row * HEADS + head) * (VALUE + TAIL)
        q_value = _load_columns(q_ptr, q_offset, 0, VALUE, VALUE_BLOCK, DOT_DTYPE, is_live)
        q_tail = _load_columns(q_ptr, q_offset, VALUE, TAIL, TAIL_BLOCK, DOT_DTYPE, is_live)
        index = (state_index + shared_chunk) * HEADS + head
        state = load_state(stats_ptr, acc_ptr, index, column, is_live & continues, VALUE)
        for tile in range(own_tile, end_tile):
            slot = tl.load(slots_ptr + (tile - own_tile) * TILE)
            value, tail = _load_tile(
                cache_ptr, slot, VALUE, VALUE_BLOCK, TAIL, TAIL_BLOCK, DOT_DTYPE
            )
            own = value
            if COLUMNS < VALUE_BLOCK:
                offset = slot.to(tl.int64)[:, None] * (VALUE + TAIL) + column[None, :]
                in_value = (slot >= 0)[:, None] & (column < VALUE)[None, :]
                own = tl.load(cache_ptr + offset, mask=in_value, other=0.0).to(DOT_DTYPE)
            is_seen = (kv_index >= kv_start) & (kv_index < kv_len)
            is_visible = (head >= 0)[:, None] & is_seen[None, :]
            scores = _scores(q_value, q_tail, value, tail)
            state = _add_scores(state, scores, own, is_visible, scale)
            chunk = chunk_of(tile, CHUNK_TILES)
            closes = tile + 1 == chunk_begin(chunk + 1, CHUNK_TILES)
            if closes | (tile + 1 == end_tile):
                folded = fold(folded, state)
                state = empty_state(QUERIES, COLUMNS)
            kv_index += TILE
    out = attention_of(folded).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + ((q_row * HEADS + head) * VALUE)[:, None] + column[None, :]
    tl.store(out_ptrs, out, mask=is_live[:, None] & (column < VALUE)[None, :])
