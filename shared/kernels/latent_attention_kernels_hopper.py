"""The first kernel of latent attention in Hopper's own instructions: tiles that rows share.

It computes what `_shared_latents_kernel` does, to the bit, and needs what that one leaves to the
compiler: the next tile is on its way from the moment that the last products with the tile before it
are done, and both products of a tile read the one copy of it.

Two warpgroups have half of the columns of a state each. Both compute all scores of a tile, so that
nothing goes from one to the other; or, with SPLIT_SCORES, each computes half of them, and they
exchange weights: fewer products and more barriers, and the same bits.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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

# Rows x heads of a program.
HOPPER_QUERIES = 64
HOPPER_WARPS = 8


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
    column = gl.arange(0, VALUE, gl.SliceLayout(0, COPY))
    tail_column = VALUE + gl.arange(0, TAIL, gl.SliceLayout(0, COPY))
    mask = None if is_wanted is None else is_wanted[:, None]
    pointers = rows_ptr + offset[:, None]
    async_copy.async_copy_global_to_shared(value, pointers + column[None, :], mask=mask)
    async_copy.async_copy_global_to_shared(tail, pointers + tail_column[None, :], mask=mask)


@gluon.jit
def _state_ptrs(acc_ptr, index, VALUE: gl.constexpr, STATE: gl.constexpr):
    """Return pointers to the sums of states. [64, VALUE]"""
    column = gl.arange(0, VALUE, gl.SliceLayout(0, STATE))
    return acc_ptr + index[:, None] * VALUE + column[None, :]


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
    SEQUENTIAL: gl.constexpr,
    SPLIT_SCORES: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,
):
    """Do what `_shared_latents_kernel` does. Grid: (G, P)."""
    QUERIES: gl.constexpr = 64
    WIDTH: gl.constexpr = VALUE + TAIL
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0],
        [4, 2] if SPLIT_SCORES else [8, 1],
        [16, TILE // 2 if SPLIT_SCORES else TILE, 16],
    )
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, VALUE // 2, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    # A thread copies two rows of a tile, so that it looks two slots up.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, VALUE], DOT_DTYPE)
    SHARED_TAIL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, TAIL], DOT_DTYPE)

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

    query = gl.arange(0, QUERIES, gl.SliceLayout(1, SCORES))  # rows x heads of the group
    row = query // HEADS_BLOCK
    in_rows = row < row_end - row_begin
    kv_len = gl.load(rows_ptr + (row_begin + row) * 8, mask=in_rows, other=0)
    kv_start = gl.load(rows_ptr + (row_begin + row) * 8 + 1, mask=in_rows, other=0)
    kv_index = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    # Slots are looked up one tile ahead of its copy. What no row sees is replaced by something that
    # one does.
    last_seen = gl.maximum(shared_end - 1, 0)
    begin = gl.maximum(chunk_begin(first_chunk, CHUNK_TILES), first_tile)
    last_tile = gl.minimum(chunk_begin(end_chunk, CHUNK_TILES), end_tile)
    key = gl.arange(0, TILE, gl.SliceLayout(1, COPY))
    seen = gl.minimum(gl.maximum(begin * TILE + key, earliest), last_seen)
    slot = slots_of(pages_ptr, seen, PAGE_SIZE)
    wait_for_previous(IS_DEPENDENT)
    if first_chunk >= end_chunk:
        return

    q_value = gl.allocate_shared_memory(DOT_DTYPE, [QUERIES, VALUE], SHARED)
    q_tail = gl.allocate_shared_memory(DOT_DTYPE, [QUERIES, TAIL], SHARED_TAIL)
    values = gl.allocate_shared_memory(DOT_DTYPE, [2, TILE, VALUE], SHARED)
    tails = gl.allocate_shared_memory(DOT_DTYPE, [2, TILE, TAIL], SHARED_TAIL)
    copied = gl.arange(0, QUERIES, gl.SliceLayout(1, COPY))
    copied_row = row_begin + copied // HEADS_BLOCK
    copied_head = copied % HEADS_BLOCK
    offset = ((copied_row.to(gl.int64) * GROUPS + group) * HEADS + copied_head) * WIDTH
    is_query = (copied_row < row_end) & (copied_head < HEADS)
    _copy_rows(q_value, q_tail, q_ptr, offset, is_query, VALUE, TAIL, COPY)
    offset = slot.to(gl.int64) * WIDTH
    buffer = begin % 2
    _copy_rows(
        values.index(buffer), tails.index(buffer), cache_ptr, offset, None, VALUE, TAIL, COPY
    )
    async_copy.commit_group()
    seen = gl.minimum(gl.maximum((begin + 1) * TILE + key, earliest), last_seen)
    slot = slots_of(pages_ptr, seen, PAGE_SIZE)

    state_query = gl.arange(0, QUERIES, gl.SliceLayout(1, STATE))
    head = state_query % HEADS_BLOCK
    state_row = row_begin + state_query // HEADS_BLOCK
    is_live = (state_row < row_end) & (head < HEADS)
    state_index = (state_row.to(gl.int64) * GROUPS + group) * num_states
    no_scores = gl.zeros([QUERIES, TILE], gl.float32, SCORES)
    no_state = gl.zeros([QUERIES, VALUE], gl.float32, STATE)
    if SEQUENTIAL:
        if end_chunk == first_chunk + 1:  # before the last chunk there is none
            index = state_index * HEADS + head
            gl.store(stats_ptr + 2 * index, gl.full_like(index, NOTHING, dtype=gl.float32), is_live)
            gl.store(stats_ptr + 2 * index + 1, gl.zeros_like(index, dtype=gl.float32), is_live)
            gl.store(_state_ptrs(acc_ptr, index, VALUE, STATE), no_state, is_live[:, None])
    for chunk in range(first_chunk, end_chunk):
        largest = gl.full([QUERIES], NOTHING, gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(1, SCORES))
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
                buffer = (tile + 1) % 2
                offset = slot.to(gl.int64) * WIDTH
                _copy_rows(
                    values.index(buffer),
                    tails.index(buffer),
                    cache_ptr,
                    offset,
                    None,
                    VALUE,
                    TAIL,
                    COPY,
                )
                seen = gl.minimum(gl.maximum((tile + 2) * TILE + key, earliest), last_seen)
                slot = slots_of(pages_ptr, seen, PAGE_SIZE)
            async_copy.commit_group()
            index = tile * TILE + kv_index
            is_visible = index[None, :] < kv_len[:, None]
            if HAS_WINDOW:
                is_visible = is_visible & (index[None, :] >= kv_start[:, None])
            scores = warpgroup_mma_wait(0, deps=(scores,))
            largest, factor, weights = weigh(largest, scores, is_visible, scale)
            sums = gl.convert_layout(sum_of_halves(weights), gl.SliceLayout(1, SCORES))
            total = gl.fma(total, factor, sums)
            factor = gl.convert_layout(factor, gl.SliceLayout(1, STATE))
            weights = gl.convert_layout(weights.to(DOT_DTYPE), WEIGHTS)
            acc = warpgroup_mma(weights, value, acc * factor[:, None])
        largest = gl.convert_layout(largest, gl.SliceLayout(1, STATE))
        total = gl.convert_layout(total, gl.SliceLayout(1, STATE))
        state = largest, total, acc
        place = chunk
        if SEQUENTIAL:
            place = gl.where(chunk + 1 < end_chunk, 0, 1)
        index = (state_index + place) * HEADS + head
        acc_ptrs = _state_ptrs(acc_ptr, index, VALUE, STATE)
        if SEQUENTIAL:
            if (chunk > first_chunk) & (chunk + 1 < end_chunk):
                before_largest = gl.load(stats_ptr + 2 * index, is_live, NOTHING)
                before_total = gl.load(stats_ptr + 2 * index + 1, is_live, 0.0)
                tl.debug_barrier()  # several threads load them, one of which stores others below
                before = gl.load(acc_ptrs, is_live[:, None], 0.0)
                state = fold((before_largest, before_total, before), state)
        gl.store(stats_ptr + 2 * index, state[0], is_live)
        gl.store(stats_ptr + 2 * index + 1, state[1], is_live)
        gl.store(acc_ptrs, state[2], is_live[:, None])
