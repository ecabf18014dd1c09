"""The arithmetic of tree attention that both of its kernels share: tiles, states, chunks.

A tile is 64 adjacent KV indices. What rows take from it is a *state*: the largest score, the sum of
the weights and the sum of the weighted V. The tiles of a chunk are added to the empty state in
ascending order, then the states of the chunks are folded, from the empty state again. Chunks are
cut at fixed KV indices, so a chunk's state is the same whoever computes it, and so is what is
folded from all of them. The sink of a head, where there is one, is added once, after all chunks.

A tile of which a row sees nothing, and an empty state, change nothing: the factor of what is there
is 2^0. (A zero may change its sign, which is why `attention_of` ends with `+ 0.0`.)

No sum over a tile depends on how a compiler spreads a tensor over threads: that of the weights is
taken in explicit pairs, the others are products, which add in order of K. A tensor core gives a row
of a product the same bits beside any others, whether 64 rows are multiplied at a time or 16.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

# KV indices of one tile, the wide operand of both products.
TRITON_KV_TILE = 64
# Tiles per chunk: this many in each of the first 16 chunks, 4 times as many in the next 28, then 16
# times. A chunk is the least that a program takes: short ones spread a short context over all of a
# GPU, long ones bound what is left to fold after a long context.
TRITON_CHUNK_TILES = 4

# Below every score, and finite: a difference of two of it is 0.
NOTHING = tl.constexpr(-1e38)
_LOG2_E = tl.constexpr(math.log2(math.e))
_SHORT = tl.constexpr(16)
_MEDIUM = tl.constexpr(28)


def num_chunks(num_tokens: int, chunk_tiles: int) -> int:
    """Return how many chunks hold KV indices [0, num_tokens).

    Args:
        chunk_tiles: Tiles of the shortest chunks.
    """
    last_tile = max(0, num_tokens - 1) // TRITON_KV_TILE
    short_tiles = _SHORT.value * chunk_tiles
    medium_tiles = _MEDIUM.value * 4 * chunk_tiles
    last_chunk = (
        min(last_tile // chunk_tiles, _SHORT.value)
        + min(max(last_tile - short_tiles, 0) // (4 * chunk_tiles), _MEDIUM.value)
        + max(last_tile - short_tiles - medium_tiles, 0) // (16 * chunk_tiles)
    )
    return last_chunk + 1


@triton.jit
def chunk_of(tile, CHUNK_TILES: tl.constexpr):
    """Return the chunk that holds a tile."""
    past_short = tl.maximum(tile - _SHORT * CHUNK_TILES, 0)
    past_medium = tl.maximum(past_short - _MEDIUM * (4 * CHUNK_TILES), 0)
    return (
        tl.minimum(tile // CHUNK_TILES, _SHORT)
        + tl.minimum(past_short // (4 * CHUNK_TILES), _MEDIUM)
        + past_medium // (16 * CHUNK_TILES)
    )


@triton.jit
def chunk_begin(chunk, CHUNK_TILES: tl.constexpr):
    """Return the first tile of a chunk."""
    past_short = tl.maximum(chunk - _SHORT, 0)
    past_medium = tl.maximum(past_short - _MEDIUM, 0)
    short_chunks = tl.minimum(chunk, _SHORT)
    medium_chunks = tl.minimum(past_short, _MEDIUM)
    return CHUNK_TILES * (short_chunks + 4 * medium_chunks + 16 * past_medium)


@triton.jit
def empty_state(QUERIES: tl.constexpr, V_BLOCK: tl.constexpr):
    """Return the state of no tile: (largest [QUERIES], total [QUERIES], acc [QUERIES, dv])."""
    largest = tl.full((QUERIES,), NOTHING, dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    acc = tl.zeros((QUERIES, V_BLOCK), dtype=tl.float32)
    return largest, total, acc


@triton.jit
def add_tile(state, q, k, v, is_visible, scale, inner_scale, HAS_SOFTCAP: tl.constexpr):
    """Return the state of a run of tiles and the one that follows it.

    Args:
        q: [QUERIES, d].
        k: [64, d].
        v: [64, dv].
        is_visible: [QUERIES, 64].
        scale: Of the scores, > 0, times log2(e): weights are powers of 2.
        inner_scale: HAS_SOFTCAP: scores are tanh of the products, which this multiplies twice and
            times log2(e) before.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), of which no operation can be fused
        twos = tl.full(scores.shape, 2.0, dtype=tl.float32)
        scores = 1.0 - tl.div_rn(twos, tl.exp2(scores * inner_scale) + 1.0)
    return add_scores(state, scores, v, is_visible, scale)


@triton.jit
def add_scores(state, scores, v, is_visible, scale):
    """Do what `add_tile` does, from the products of queries and keys, [QUERIES, 64]."""
    QUERIES: tl.constexpr = scores.shape[0]
    largest, factor, weights = weigh(state[0], scores, is_visible, scale)
    pairs = tl.sum(tl.reshape(weights, (QUERIES, 2, 32)), axis=1)
    pairs = tl.sum(tl.reshape(pairs, (QUERIES, 2, 16)), axis=1)
    pairs = tl.sum(tl.reshape(pairs, (QUERIES, 2, 8)), axis=1)
    pairs = tl.sum(tl.reshape(pairs, (QUERIES, 2, 4)), axis=1)
    pairs = tl.sum(tl.reshape(pairs, (QUERIES, 2, 2)), axis=1)
    total = tl.fma(state[1], factor, tl.sum(pairs, axis=1))
    acc = state[2] * factor[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return largest, total, acc


@triton.jit
def weigh(largest_before, scores, is_visible, scale):
    """Return the largest score of a run of tiles and the one that follows it, the factor of what
    the run has summed, and the weights of the tile, [QUERIES, 64].

    Args:
        scores: Products of queries and keys, [QUERIES, 64].
    """
    scores = tl.where(is_visible, scores, -float("inf"))
    largest = tl.maximum(tl.max(scores, axis=1) * scale, largest_before)
    factor = tl.exp2(largest_before - largest)
    weights = tl.exp2(tl.fma(scores, scale, -largest[:, None]))
    return largest, factor, weights


@triton.jit
def fold(state, following):
    """Return the state of two runs of tiles, `state` the earlier one."""
    largest = tl.maximum(state[0], following[0])
    factor = tl.exp2(state[0] - largest)
    following_factor = tl.exp2(following[0] - largest)
    total = tl.fma(state[1], factor, following[1] * following_factor)
    acc = tl.fma(state[2], factor[:, None], following[2] * following_factor[:, None])
    return largest, total, acc


@triton.jit
def add_sink(state, sink):
    """Return the state of all tiles and a score that takes its share of the weight, and has no V.

    Args:
        sink: [QUERIES] f32, the score as learned.
    """
    sink *= _LOG2_E
    largest = tl.maximum(state[0], sink)
    factor = tl.exp2(state[0] - largest)
    total = tl.fma(state[1], factor, tl.exp2(sink - largest))
    return largest, total, state[2] * factor[:, None]


@triton.jit
def attention_of(state):
    """Return the weighted mean of V, [QUERIES, dv]; 0 of an empty state."""
    return state[2] / tl.where(state[1] > 0.0, state[1], 1.0)[:, None] + 0.0


@triton.jit
def load_stats(stats_ptr, index, is_stored):
    """Return (largest, total) of stored states, or of the empty one where nothing `is_stored`.

    Args:
        index: Of the states, i64 [QUERIES].
        is_stored: [QUERIES].
    """
    largest = tl.load(stats_ptr + 2 * index, mask=is_stored, other=NOTHING)
    return largest, tl.load(stats_ptr + 2 * index + 1, mask=is_stored, other=0.0)


@triton.jit
def load_acc(acc_ptr, index, column, is_stored, WIDTH: tl.constexpr):
    """Return columns of stored states likewise, and zeros past WIDTH. [QUERIES, columns]"""
    mask = is_stored[:, None] & (column < WIDTH)[None, :]
    return tl.load(acc_ptr + index[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_state(stats_ptr, acc_ptr, index, column, is_stored, WIDTH: tl.constexpr):
    """Return columns of stored states and their stats."""
    largest, total = load_stats(stats_ptr, index, is_stored)
    return largest, total, load_acc(acc_ptr, index, column, is_stored, WIDTH)


@triton.jit
def store_state(stats_ptr, acc_ptr, index, is_live, state, WIDTH: tl.constexpr):
    """Store states; see `load_stats`."""
    column = tl.arange(0, state[2].shape[1])
    tl.store(stats_ptr + 2 * index, state[0], mask=is_live)
    tl.store(stats_ptr + 2 * index + 1, state[1], mask=is_live)
    acc_ptrs = acc_ptr + index[:, None] * WIDTH + column[None, :]
    tl.store(acc_ptrs, state[2], mask=is_live[:, None] & (column < WIDTH)[None, :])
