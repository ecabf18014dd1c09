"""Keys that order pairs of (value, index) as one integer, for kernels that pick the best of many.

Device functions only. A key ascends with the value, at equal values with the lower index, so keys
of different indices never tie, and value and index can be read back from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Below the key of every value.
NO_KEY: tl.constexpr = tl.constexpr(-(1 << 62))


@triton.jit
def order_key(value, index):
    """Return i64 keys.

    Args:
        value: f32, no NaN; -0 counts as 0.
        index: Below 2^31.
    """
    value = tl.where(value == 0.0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 31) + (0x7FFFFFFF - index)


@triton.jit
def key_value(key):
    """Return the values of keys, f32; -inf for NO_KEY."""
    ordered = (key >> 31).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return tl.where(key == NO_KEY, -float("inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def key_index(key):
    """Return the indices of keys, i64; 0 for NO_KEY."""
    return tl.where(key == NO_KEY, 0, 0x7FFFFFFF - (key & 0x7FFFFFFF))


@triton.jit
def best_keys(keys, COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr):
    """Return the COUNT largest of a block of keys, descending; NO_KEY where there are fewer.

    Returns: [COUNT_BLOCK] i64, NO_KEY past COUNT.
    """
    lane = tl.arange(0, COUNT_BLOCK)
    best = tl.full((COUNT_BLOCK,), NO_KEY, dtype=tl.int64)
    for rank in range(COUNT):
        largest = tl.max(keys, axis=0)
        best = tl.where(lane == rank, largest, best)
        keys = tl.where(keys == largest, NO_KEY, keys)
    return best
