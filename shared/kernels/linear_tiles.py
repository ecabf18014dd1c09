"""How a matrix product is cut into splits and tiles, and its tiles into programs."""

from __future__ import annotations

import math
from typing import NamedTuple

import triton

from shared.kernels.balanced_tiles import Deal, deal_tiles

# Splits are made until there are this many programs of SPLIT_BLOCK_N outputs, about as many as keep
# the memory of a large GPU busy, but none shorter than MIN_SPLIT_K.
_MIN_PROGRAMS = 192
_SPLIT_BLOCK_N = 64
_MIN_SPLIT_K = 1024
# Of weights in FP8 whose rows are so, too: their programs load half the bytes.
_MIN_FP8_PROGRAMS, _MIN_FP8_SPLIT_K = 256, 512
_SPLIT_MULTIPLE = 128

# As many outputs fill a GPU with tall tiles too: those of a vocabulary.
_WIDE_N = 1 << 14
# Programs of large tiles that run at once, one per multiprocessor of the largest GPUs, and what a
# program of wide tiles, or a share as large as a tile, takes as a multiple of one of square tiles.
_NUM_MULTIPROCESSORS = 132
_WIDE_TILE_COST, _SHARE_COST = 1.7, 1.25
# More rows than this are computed by programs that walk all splits.
MAX_SPLIT_ROWS = 256
# The same where rows are in FP8: products take half the time, and addends as long as ever.
MAX_FP8_SPLIT_ROWS = 128


class Tiles(NamedTuple):
    """How a product is tiled; none of it changes a bit."""

    block_n: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int


SQUARE_TILES, _WIDE = Tiles(128, 128, 64, 8, 4), Tiles(128, 256, 64, 8, 4)
SQUARE_FP8_TILES = Tiles(128, 128, 128, 8, 3)


def num_splits(width_n: int, width_k: int, *, has_fp8_rows: bool = False) -> int:
    """Return into how many parts the K dimension of a weight [N, K] is cut."""
    least, shortest = _MIN_PROGRAMS, _MIN_SPLIT_K
    if has_fp8_rows:
        least, shortest = _MIN_FP8_PROGRAMS, _MIN_FP8_SPLIT_K
    splits = 1
    tall_tiles = triton.cdiv(width_n, _SPLIT_BLOCK_N)
    while tall_tiles * splits < least and width_k >= 2 * splits * shortest:
        splits *= 2
    return splits


def split_width(width_k: int, splits: int, multiple: int = _SPLIT_MULTIPLE) -> int:
    """Return the length of every split but the last, which may be shorter.

    Args:
        multiple: What it is a multiple of.
    """
    return triton.cdiv(triton.cdiv(width_k, splits), multiple) * multiple


# Tensor cores add up 16 values of k at a time, 32 of e4m3, whatever the tile. What interprets a
# kernel on a CPU does not, and gets the same tiles always.
INTERPRETED_TILES = Tiles(64, 32, 64, 4, 1)


def choose_tiles(num_rows: int, element_size: int, width_n: int) -> Tiles:
    """Return a GPU's tiles of a product with `num_rows` rows, values of `element_size` bytes."""
    if element_size == 4:
        return Tiles(64, 32, 32, 4, 3)
    if num_rows <= 16:
        return Tiles(64, 16, 128, 4, 4)
    if num_rows <= 32:
        return Tiles(64, 32, 128, 4, 4)
    if num_rows <= 64:
        return Tiles(64, 64, 128, 4, 3)
    if num_rows <= 128:
        return Tiles(128, 128, 64, 8, 3) if width_n >= _WIDE_N else Tiles(64, 128, 64, 4, 4)
    if num_rows <= MAX_SPLIT_ROWS:
        return _WIDE  # splits fill the GPU
    return (
        _WIDE if _wide_cost(num_rows, width_n) < _square_cost(num_rows, width_n) else SQUARE_TILES
    )


def choose_fp8_tiles(
    num_rows: int, element_size: int, shape: tuple[int, int], *, by_block: bool
) -> Tiles:
    """Return a GPU's tiles of a product with a weight [N, K] in FP8.

    Args:
        element_size: Bytes of a value of a row.
        by_block: Blocks of K have scales of their own. Then tiles are as long as blocks, or else a
            sum would have other bits; and sums of a block and of all take twice the registers.
    """
    if element_size == 4:
        return Tiles(64, 32, 32, 4, 3)
    splits = num_splits(*shape)
    fits = splits == 1 or split_width(shape[1], splits) % 256 == 0
    if num_rows <= 32:
        block_t = 16 if num_rows <= 16 else 32
        is_long = fits and not by_block  # instructions per byte decide: the fewer turns the better
        return Tiles(64, block_t, 256, 4, 4) if is_long else Tiles(64, block_t, 128, 4, 6)
    if num_rows <= 64:
        return Tiles(64, 64, 128, 4, 4)
    if num_rows <= 128 or by_block or (splits > 1 and num_rows > MAX_SPLIT_ROWS):
        # The sums of a split and of all would not fit into registers. Spilled, beside weights that
        # are widened there, they came out wrong; weights in 16 bits are read from shared memory.
        return SQUARE_FP8_TILES
    return _WIDE


def choose_fp8_row_tiles(num_rows: int, shape: tuple[int, int], *, by_block: bool) -> Tiles:
    """Return a GPU's tiles of a product of rows and a weight [N, K] in FP8, at most as long as what
    shares a scale.

    Args:
        by_block: Blocks of K have scales of their own.
    """
    width_n, width_k = shape
    if num_rows <= 32:
        block_t = 16 if num_rows <= 16 else 32
        if not by_block and split_width(width_k, num_splits(*shape, has_fp8_rows=True)) % 256 == 0:
            # Of few rows a fourth stage leaves room for two programs where there would be three.
            return Tiles(64, block_t, 256, 4, 3 if num_rows <= 16 else 4)
        return Tiles(64, block_t, 128, 4, 3 if by_block and num_rows <= 16 else 4)
    if num_rows <= 64:
        return Tiles(64, 64, 128, 4, 5)
    tiles = Tiles(64, 128, 128, 4, 4)
    # One more stage leaves room for one program only.
    is_one = num_rows > MAX_FP8_SPLIT_ROWS and (
        math.prod(num_tiles(tiles, num_rows, width_n)) <= _NUM_MULTIPROCESSORS
    )
    return tiles._replace(num_stages=5) if is_one and not by_block else tiles


def choose_int4_tiles(num_rows: int, element_size: int, block_k: int) -> Tiles:
    """Return a GPU's tiles of a product with a weight in int4.

    Args:
        element_size: Bytes of a value of a row.
        block_k: Of the weight, see `Int4Weight`.
    """
    if element_size == 4:
        return Tiles(32, 16, block_k, 4, 2)
    is_long = block_k > 256  # then more stages would leave room for one program only
    if num_rows <= 16:
        return Tiles(64, 16, block_k, 4, 3 if is_long else 4)
    if num_rows <= 32:
        return Tiles(64, 32, block_k, 4, 2 if is_long else 4)
    return Tiles(128, 64, block_k, 8, 2 if is_long else 3)


def choose_deal(num_rows: int, width_n: int, width_k: int) -> Deal | None:
    """Return how square tiles are dealt out to programs; None: a program per tile is faster."""
    splits = num_splits(width_n, width_k)
    split_k = split_width(width_k, splits)
    if num_rows <= MAX_SPLIT_ROWS or split_k * splits != width_k or split_k % SQUARE_TILES.block_k:
        return None
    deal = deal_tiles(*num_tiles(SQUARE_TILES, num_rows, width_n), _NUM_MULTIPROCESSORS)
    if deal is None:
        return None
    units = num_tiles(SQUARE_TILES, num_rows, width_n)[1] * splits
    share = math.ceil(units / deal.num_members) / splits  # of the largest member, in tiles
    tiles_cost = min(_square_cost(num_rows, width_n), _wide_cost(num_rows, width_n))
    return deal if _SHARE_COST * share < tiles_cost else None


def num_tiles(tiles: Tiles, num_rows: int, width_n: int) -> tuple[int, int]:
    """Return how many tiles there are of T, and of N."""
    return int(triton.cdiv(num_rows, tiles.block_t)), int(triton.cdiv(width_n, tiles.block_n))


def _square_cost(num_rows: int, width_n: int) -> float:
    """Return how many square tiles run one after the other where a program walks all splits."""
    return math.ceil(math.prod(num_tiles(SQUARE_TILES, num_rows, width_n)) / _NUM_MULTIPROCESSORS)


def _wide_cost(num_rows: int, width_n: int) -> float:
    """Return the same of wide tiles, in the time of square ones."""
    num_turns = math.prod(num_tiles(_WIDE, num_rows, width_n)) / _NUM_MULTIPROCESSORS
    return _WIDE_TILE_COST * math.ceil(num_turns)
