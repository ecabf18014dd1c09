"""K and V in FP8: what caches of e4m3 hold, and how a kernel makes it.

A cached value times the scale of its cache is what was stored, rounded to the nearest value of e4m3
(ties to even) and kept within +-448. The scales are two numbers of a layer, known before the first
token: what a row leaves in the caches is a function of that row alone. Kernels convert by moving
bits, see quantized.py, so that every GPU, Triton's interpreter and torch store the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.kernels.quantized import E4M3_MAX

_MAX = tl.constexpr(E4M3_MAX)
# The least normal value of e4m3, 2^-6: below it values are multiples of 2^-9.
_MIN_NORMAL = tl.constexpr(2.0**-6)
# float32 has multiples of 2^-9 from here on: what is added to it is rounded to them.
_ROUNDER = tl.constexpr(2.0**14)
_ROUNDER_BITS = tl.constexpr((127 + 14) << 23)
# Exponents of float32 less those of e4m3, above 3 bits of mantissa.
_REBIAS_BITS = tl.constexpr((127 - 7) << 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScales:
    """What the values of a layer's caches in FP8 are multiplied by; > 0, finite. Caches in another
    dtype hold K and V as they are.
    """

    k: float = 1.0
    v: float = 1.0


UNSCALED = KVScales()


def is_fp8(cache: torch.Tensor) -> bool:
    """Return whether a cache holds e4m3."""
    return cache.dtype == torch.float8_e4m3fn


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache as kernels take it: e4m3 as u8, any other dtype as it is."""
    return cache.view(torch.uint8) if is_fp8(cache) else cache


def to_cache(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return values as a cache of a dtype holds them.

    Args:
        scale: Of the cache, if it is in FP8.
    """
    if dtype != torch.float8_e4m3fn:
        return values.to(dtype)
    return (values.float() * (1 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(dtype)


def from_cache(
    cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float
) -> torch.Tensor:
    """Return what a cache holds of slots, as a model computes with it. [T, Hkv, d]

    Args:
        cache: [num_slots, Hkv, d].
        slots: [T] i64.
        dtype: Of the model.
        scale: Of the cache, if it is in FP8.
    """
    rows = as_bytes(cache).index_select(0, slots).view(cache.dtype)
    return (rows.float() * scale).to(dtype) if is_fp8(cache) else rows


@triton.jit
def to_e4m3(values):
    """Return values as bytes of e4m3, clamped to its range; device function.

    Args:
        values: Block of f32.
    """
    bits = values.to(tl.uint32, bitcast=True)
    is_number = values == values
    magnitude = tl.minimum(tl.where(is_number, tl.abs(values), 0.0), _MAX)
    large = magnitude.to(tl.uint32, bitcast=True)
    large = (large + 0x7FFFF + ((large >> 20) & 1)) >> 20
    small = (magnitude + _ROUNDER).to(tl.uint32, bitcast=True) - _ROUNDER_BITS
    code = tl.where(magnitude < _MIN_NORMAL, small, large - _REBIAS_BITS)
    code = tl.where(is_number, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
