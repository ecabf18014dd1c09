"""The arithmetic of tree attention that both of its kernels share: tiles, states, chunks.

A tile is 64 adjacent KV indices. What rows take from it is a *state*: the largest score, the sum of
the weights and the sum of the weighted V, from this tile alone. The tiles of a chunk are folded in
ascending order, then the chunks are, both from the empty state. Chunks are cut at fixed KV indices,
so a chunk's state is the same whoever computes it, and so is what is folded from all of them.

Folding an empty state changes nothing: the factor of the other one is 2^0. (A zero may change its
sign, which is why `attention_of` ends with `+ 0.0`.)

No sum depends on how a compiler spreads a tensor over threads: they are taken in explicit pairs, or
by products, which add in order of K.
"""

from __future__ import annotations

import triton
import triton.language as tl

# KV indices of one tile, the wide operand of both products.
TRITON_KV_TILE = 64
# Tiles per chunk: this many in each of the first 16 chunks, 4 times as many in the next 12, then 16
# times. A chunk is the least that a program takes: short ones spread a short context over all of a
# GPU, long ones bound what is left to fold after a long context.
TRITON_CHUNK_TILES = 4

# Below every score, and finite: a difference of two of it is 0.
NOTHING = tl.constexpr(-1e38)
_SHORT = tl.constexpr(16)
_MEDIUM = tl.constexpr(12)


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
def empty_state(DIM_BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the state of no tile: (largest [COLUMNS], total [4, 8, COLUMNS], acc [d, COLUMNS]).

    The sum of the weights stays in 32 parts, those of rows (4 warps, 8 lanes) of a product, until
    the very end: no thread has to wait for another one's.
    """
    largest = tl.full((COLUMNS,), NOTHING, dtype=tl.float32)
    total = tl.zeros((4, 8, COLUMNS), dtype=tl.float32)
    acc = tl.zeros((DIM_BLOCK, COLUMNS), dtype=tl.float32)
    return largest, total, acc


@triton.jit
def tile_state(k, v, q, is_visible, scale):
    """Return the state of one tile.

    Args:
        k: [64, d].
        v: [64, d].
        q: [d, COLUMNS].
        is_visible: [64, COLUMNS].
        scale: Of the scores, > 0, times log2(e): weights are powers of 2.
    """
    COLUMNS: tl.constexpr = q.shape[1]
    scores = tl.dot(k, q, input_precision="ieee")
    scores = tl.where(is_visible, scores, -float("inf"))
    largest = tl.maximum(tl.max(scores, axis=0) * scale, NOTHING)
    weights = tl.exp2(tl.fma(scores, scale, -largest[None, :]))
    # A thread holds rows i and i + 8 of a product.
    total = tl.sum(tl.reshape(weights, (4, 2, 8, COLUMNS)), axis=1)
    acc = tl.dot(tl.trans(v), weights.to(v.dtype), input_precision="ieee")
    return largest, total, acc


@triton.jit
def fold(state, following):
    """Return the state of two runs of tiles, `state` the earlier one."""
    largest = tl.maximum(state[0], following[0])
    factor = tl.exp2(state[0] - largest)
    following_factor = tl.exp2(following[0] - largest)
    total = following[1] * following_factor[None, None, :]
    total = tl.fma(state[1], factor[None, None, :], total)
    acc = following[2] * following_factor[None, :]
    acc = tl.fma(state[2], factor[None, :], acc)
    return largest, total, acc


@triton.jit
def attention_of(state):
    """Return the weighted mean of V, [d, COLUMNS]; 0 of an empty state."""
    COLUMNS: tl.constexpr = state[2].shape[1]
    total = tl.sum(tl.reshape(state[1], (4, 2, 4, COLUMNS)), axis=1)
    total = tl.sum(tl.reshape(total, (4, 2, 2, COLUMNS)), axis=1)
    total = tl.sum(tl.reshape(total, (2, 2, 2, COLUMNS)), axis=2)
    total = tl.sum(tl.sum(total, axis=1), axis=0)
    return state[2] / tl.where(total > 0.0, total, 1.0)[None, :] + 0.0
