"""The first kernel of latent attention in Hopper's own instructions: tiles that rows share.

It computes what `_shared_latents_kernel` does, to the bit, 1.5 to 1.75 times as fast on an H200:
the next tile is on its way from the moment that the last products with the tile before it are done,
both products of a tile read the one copy of it in shared memory, and a state stays in the registers
of two warpgroups. None of this can be said in Triton's language, whose compiler decides where a
tile is kept, how far ahead it is loaded and which warp has what. Hence Gluon, Triton's lower
language, in which layouts, copies and waits are written down.

A program has rows x heads of a group, 64 of them, as the plain kernel has, and walks over the tiles
of its chunks with two copies of a tile's room. Each of the two warpgroups computes the scores of 32
keys of a tile and half of the columns of the state; weights go from one to the other in between.

Fixed for the sake of a row's bits, as in the plain kernel: a score adds its values in the order of
the row, the tail last; weights are added as `sum_of_halves` says, whose halves are those of the two
warpgroups; tiles are added in order, and a chunk starts from an empty state. No row's place among
the 64 is in any of this.

Gluon's API is experimental. This module was run with Triton 3.6 on an H200, and compiled with 3.5.1
and 3.7.1; what another version may lack is imported by name, so that the import of this module
fails and the plain kernel is chosen (`hopper_kernel` in `latent_attention`). Import it nowhere
else: interpreted kernels and CPUs have no use for it.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import (
    BlockedLayout,
    DotOperandLayout,
    NVMMADistributedLayout,
    NVMMASharedLayout,
    SliceLayout,
    allocate_shared_memory,
    convert_layout,
)
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shared.kernels.dependent_launch import wait_for_previous
from shared.kernels.latent_attention_kernels import sum_of_halves
from shared.kernels.page_slots import slots_of
from shared.kernels.tree_attention_tiles import NOTHING, chunk_begin, fold, weigh


@gluon.jit
def _copy_rows(
    value,  # [64, VALUE] in shared memory, mutated
    tail,  # [64, TAIL] likewise
    rows_ptr,
    offset,  # of each row, i64 [64]
    is_wanted,  # None or [64]; False: zeros
    VALUE: gl.constexpr,
    TAIL: gl.constexpr,
    COPY: gl.constexpr,
):
    """Begin to copy rows of a cache or of queries; a part of the copies that are committed next."""
    column = gl.arange(0, VALUE, SliceLayout(0, COPY))
    tail_column = VALUE + gl.arange(0, TAIL, SliceLayout(0, COPY))
    mask = None if is_wanted is None else is_wanted[:, None]
    pointers = rows_ptr + offset[:, None]
    async_copy.async_copy_global_to_shared(value, pointers + column[None, :], mask=mask)
    async_copy.async_copy_global_to_shared(tail, pointers + tail_column[None, :], mask=mask)


@gluon.jit
def _slots_of_tile(
    pages_ptr,
    tile,
    earliest,
    last_seen,
    TILE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    COPY: gl.constexpr,
):
    """Return the slots of a tile's keys, [TILE]; what no row sees is replaced by what one does."""
    key = gl.arange(0, TILE, SliceLayout(1, COPY))
    seen = gl.minimum(gl.maximum(tile * TILE + key, earliest), last_seen)
    return slots_of(pages_ptr, seen, PAGE_SIZE)


@gluon.jit
def _copy_tile(
    values,  # [2, TILE, VALUE] in shared memory, mutated
    tails,  # [2, TILE, TAIL] likewise
    cache_ptr,
    tile,
    slot,
    VALUE: gl.constexpr,
    TAIL: gl.constexpr,
    COPY: gl.constexpr,
):
    """Begin to copy a tile into its room."""
    room = tile % 2
    offset = slot.to(gl.int64) * (VALUE + TAIL)
    value, tail = values.index(room), tails.index(room)
    _copy_rows(value, tail, cache_ptr, offset, None, VALUE, TAIL, COPY)


@gluon.jit
def _state_ptrs(acc_ptr, index, VALUE: gl.constexpr, STATE: gl.constexpr):
    """Return pointers to the sums of states. [64, VALUE]"""
    column = gl.arange(0, VALUE, SliceLayout(0, STATE))
    return acc_ptr + index[:, None] * VALUE + column[None, :]


@gluon.jit
def _store_state(stats_ptr, acc_ptrs, index, is_live, state):
    """Store the states of live queries; their sums at `acc_ptrs`."""
    gl.store(stats_ptr + 2 * index, state[0], is_live)
    gl.store(stats_ptr + 2 * index + 1, state[1], is_live)
    gl.store(acc_ptrs, state[2], is_live[:, None])


@gluon.jit
def _fold_stored(stats_ptr, acc_ptrs, index, is_live, state):
    """Return the states that are stored there with those that follow folded into them."""
    largest = gl.load(stats_ptr + 2 * index, is_live, NOTHING)
    total = gl.load(stats_ptr + 2 * index + 1, is_live, 0.0)
    tl.debug_barrier()  # several threads load them, one of which stores what they become
    acc = gl.load(acc_ptrs, is_live[:, None], 0.0)
    return fold((largest, total, acc), state)


@gluon.jit(do_not_specialize=["num_states"])
def _shared_latents_hopper_kernel(
    q_ptr,  # [T, Hq, VALUE + TAIL]
    cache_ptr,  # [num_slots, VALUE + TAIL]
    stats_ptr,  # [T, G, S, H, 2] f32 mutated: largest, total
    acc_ptr,  # [T, G, S, H, VALUE] f32 mutated
    page_table_ptr,  # [max_reqs, max_pages_per_req] i32
    blocks_ptr,  # [P, 16] i32, see `schedule`
    rows_ptr,  # [T, 8] i32, likewise
    num_states,
    scale,
    DOT_DTYPE: gl.constexpr,
    GROUPS: gl.constexpr,
    HEADS: gl.constexpr,
    HEADS_BLOCK: gl.constexpr,
    VALUE: gl.constexpr,
    TAIL: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    CHUNK_TILES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    ROWS: gl.constexpr,
    SEQUENTIAL: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,
):
    """Do what `_shared_latents_kernel` does. Grid: (G, P)."""
    QUERIES: gl.constexpr = ROWS * HEADS_BLOCK
    WIDTH: gl.constexpr = VALUE + TAIL
    gl.static_assert(QUERIES == 64, "warps are dealt out to 64 rows x heads")
    SCORES: gl.constexpr = NVMMADistributedLayout([3, 0], [4, 2], [16, TILE // 2, 16])
    STATE: gl.constexpr = NVMMADistributedLayout([3, 0], [4, 2], [16, VALUE // 2, 16])
    WEIGHTS: gl.constexpr = DotOperandLayout(0, STATE, 2)
    # A thread copies two rows of a tile, so that it looks two slots up.
    COPY: gl.constexpr = BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = NVMMASharedLayout.get_default_for([TILE, VALUE], DOT_DTYPE)
    SHARED_TAIL: gl.constexpr = NVMMASharedLayout.get_default_for([TILE, TAIL], DOT_DTYPE)

    group = gl.program_id(0).to(gl.int64)
    blocks_ptr += gl.program_id(1) * 16
    first_chunk = gl.load(blocks_ptr)
    end_chunk = gl.load(blocks_ptr + 1)
    first_tile = gl.load(blocks_ptr + 2)
    end_tile = gl.load(blocks_ptr + 3)
    earliest = gl.load(blocks_ptr + 4)
    shared_end = gl.load(blocks_ptr + 5)
    row_begin = gl.load(blocks_ptr + 6)
    row_end = gl.load(blocks_ptr + 7)
    pages_ptr = page_table_ptr + gl.load(blocks_ptr + 8)

    query = gl.arange(0, QUERIES, SliceLayout(1, SCORES))  # rows x heads of the group
    row = query // HEADS_BLOCK
    in_rows = row < row_end - row_begin
    kv_len = gl.load(rows_ptr + (row_begin + row) * 8, mask=in_rows, other=0)
    kv_start = gl.load(rows_ptr + (row_begin + row) * 8 + 1, mask=in_rows, other=0)
    kv_index = gl.arange(0, TILE, SliceLayout(0, SCORES))
    # Slots are looked up one tile ahead of its copy.
    last_seen = gl.maximum(shared_end - 1, 0)
    begin = gl.maximum(chunk_begin(first_chunk, CHUNK_TILES), first_tile)
    last_tile = gl.minimum(chunk_begin(end_chunk, CHUNK_TILES), end_tile)
    slot = _slots_of_tile(pages_ptr, begin, earliest, last_seen, TILE, PAGE_SIZE, COPY)
    wait_for_previous(IS_DEPENDENT)
    if first_chunk >= end_chunk:
        return

    q_value = allocate_shared_memory(DOT_DTYPE, [QUERIES, VALUE], SHARED)
    q_tail = allocate_shared_memory(DOT_DTYPE, [QUERIES, TAIL], SHARED_TAIL)
    values = allocate_shared_memory(DOT_DTYPE, [2, TILE, VALUE], SHARED)
    tails = allocate_shared_memory(DOT_DTYPE, [2, TILE, TAIL], SHARED_TAIL)
    copied = gl.arange(0, QUERIES, SliceLayout(1, COPY))
    copied_row = row_begin + copied // HEADS_BLOCK
    copied_head = copied % HEADS_BLOCK
    offset = ((copied_row.to(gl.int64) * GROUPS + group) * HEADS + copied_head) * WIDTH
    is_query = (copied_row < row_end) & (copied_head < HEADS)
    _copy_rows(q_value, q_tail, q_ptr, offset, is_query, VALUE, TAIL, COPY)
    _copy_tile(values, tails, cache_ptr, begin, slot, VALUE, TAIL, COPY)
    async_copy.commit_group()
    slot = _slots_of_tile(pages_ptr, begin + 1, earliest, last_seen, TILE, PAGE_SIZE, COPY)

    state_query = gl.arange(0, QUERIES, SliceLayout(1, STATE))
    head = state_query % HEADS_BLOCK
    state_row = row_begin + state_query // HEADS_BLOCK
    is_live = (state_row < row_end) & (head < HEADS)
    state_index = (state_row.to(gl.int64) * GROUPS + group) * num_states
    no_scores = gl.zeros([QUERIES, TILE], gl.float32, SCORES)
    no_state = gl.zeros([QUERIES, VALUE], gl.float32, STATE)
    if SEQUENTIAL:
        if end_chunk == first_chunk + 1:  # before the last chunk there is none
            largest = gl.full([QUERIES], NOTHING, gl.float32, SliceLayout(1, STATE))
            total = gl.zeros([QUERIES], gl.float32, SliceLayout(1, STATE))
            index = state_index * HEADS + head
            acc_ptrs = _state_ptrs(acc_ptr, index, VALUE, STATE)
            _store_state(stats_ptr, acc_ptrs, index, is_live, (largest, total, no_state))
    for chunk in range(first_chunk, end_chunk):
        largest = gl.full([QUERIES], NOTHING, gl.float32, SliceLayout(1, SCORES))
        total = gl.zeros([QUERIES], gl.float32, SliceLayout(1, SCORES))
        acc = no_state
        begin = gl.maximum(chunk_begin(chunk, CHUNK_TILES), first_tile)
        end = gl.minimum(chunk_begin(chunk + 1, CHUNK_TILES), end_tile)
        for tile in range(begin, end):
            value = values.index(tile % 2)
            tail = tails.index(tile % 2)
            async_copy.wait_group(0)
            fence_async_shared()
            tl.debug_barrier()  # what all threads copied is there, and none reads the tile before
            scores = warpgroup_mma(q_value, value.permute((1, 0)), no_scores, is_async=True)
            scores = warpgroup_mma(q_tail, tail.permute((1, 0)), scores, is_async=True)
            if tile + 1 < last_tile:
                _copy_tile(values, tails, cache_ptr, tile + 1, slot, VALUE, TAIL, COPY)
                slot = _slots_of_tile(
                    pages_ptr, tile + 2, earliest, last_seen, TILE, PAGE_SIZE, COPY
                )
            async_copy.commit_group()
            index = tile * TILE + kv_index
            is_visible = index[None, :] < kv_len[:, None]
            if HAS_WINDOW:
                is_visible = is_visible & (index[None, :] >= kv_start[:, None])
            scores = warpgroup_mma_wait(0, deps=(scores,))
            largest, factor, weights = weigh(largest, scores, is_visible, scale)
            sums = convert_layout(sum_of_halves(weights), SliceLayout(1, SCORES))
            total = gl.fma(total, factor, sums)
            factor = convert_layout(factor, SliceLayout(1, STATE))
            weights = convert_layout(weights.to(DOT_DTYPE), WEIGHTS)
            acc = warpgroup_mma(weights, value, acc * factor[:, None])
        largest = convert_layout(largest, SliceLayout(1, STATE))
        total = convert_layout(total, SliceLayout(1, STATE))
        state = largest, total, acc
        place = chunk
        if SEQUENTIAL:
            place = gl.where(chunk + 1 < end_chunk, 0, 1)
        index = (state_index + place) * HEADS + head
        acc_ptrs = _state_ptrs(acc_ptr, index, VALUE, STATE)
        if SEQUENTIAL:
            if (chunk > first_chunk) & (chunk + 1 < end_chunk):
                state = _fold_stored(stats_ptr, acc_ptrs, index, is_live, state)
        _store_state(stats_ptr, acc_ptrs, index, is_live, state)
