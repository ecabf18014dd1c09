"""Counter-based Gumbel noise: a pure function of (seed, position, token id).

Kernels that need it call the device function; the reference is its torch twin.

key  = mix64(seed ^ mix64(position + GOLDEN))
bits = mix64(key + (id + 1) * GOLDEN)           mix64 is SplitMix64's finalizer
u    = (min(bits >> 11, 2^53 - 2) + 0.5) * 2^-53   in float64; 2^53 - 0.5 would round u to 1
G    = -log(-log(u))                            in float64, rounded to float32
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.vector_math import settle_vector_math

# SplitMix64's constants as signed 64-bit bit patterns.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

# Values that a CPU works on at once: its temporaries stay in the cache.
_CPU_CHUNK = 1 << 15


@triton.jit
def _mix64_block(value):
    """Return SplitMix64's finalizer of a block of u64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _bits_block(seed, position, ids):
    """Return the 64 random bits of a block of ids, u64."""
    golden = tl.full((1,), 0x9E3779B97F4A7C15, dtype=tl.uint64)
    inner = _mix64_block(golden + position.to(tl.uint64))
    key = _mix64_block(inner ^ seed.to(tl.uint64))
    return _mix64_block(key + (ids + 1).to(tl.uint64) * golden)


@triton.jit
def gumbel_block(seed, position, ids):
    """Return the noise of a block of ids, f32; device function.

    Args:
        seed: i64 scalar.
        position: i64 scalar.
        ids: [N] i64.
    """
    bits = tl.minimum(_bits_block(seed, position, ids) >> 11, 0x1FFFFFFFFFFFFE)
    # 2^-53
    uniform = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def gumbel_bound_block(seed, position, ids):
    """Return f32 values, cheap to compute, that are at least the noise; arguments as above.

    -log(u) >= 1 - u, so the noise is at most -log(1 - u): equal to first order where the noise is
    large. 1 - u is taken from the upper 32 bits, rounded down; the slack of 1e-4 is far more than
    what the logarithm can be off.
    """
    below_one = (0xFFFFFFFF - (_bits_block(seed, position, ids) >> 32)).to(tl.int64)
    # 32 log(2) + slack
    bound = 22.180809777918255 - tl.log(tl.maximum(below_one, 1).to(tl.float32))
    return tl.where(below_one == 0, 37.0, bound)  # no noise is larger than 36.8


def gumbel_noise_ref(seed: torch.Tensor, position: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise for token ids at absolute positions, in plain torch.

    Args:
        seed: [R] i64, the bit pattern of the request's unsigned seed.
        position: [R] i64. Absolute position of the token being sampled.
        ids: [V] or [R, K] i64. Target token ids.
    Returns: [R, V] or [R, K] f32.
    Source: SplitMix64, Steele, Lea and Flood 2014.
    """
    settle_vector_math()
    key = _mix64(seed ^ _mix64(position + _GOLDEN))  # [R]
    out = torch.empty((len(key), ids.shape[-1]), dtype=torch.float32, device=key.device)
    ids = ids.expand(out.shape)
    num_rows = max(1, _CPU_CHUNK // max(1, out.shape[1]))
    for begin in range(0, len(key), num_rows):
        rows = slice(begin, begin + num_rows)
        bits = _mix64(key[rows].unsqueeze(-1) + (ids[rows] + 1) * _GOLDEN)
        bits = (bits >> 11).bitwise_and_((1 << 53) - 1).clamp_(max=(1 << 53) - 2)
        uniform = bits.to(torch.float64)
        uniform.add_(0.5).mul_(2.0**-53)
        out[rows] = uniform.log_().neg_().log_().neg_()
    return out


def _mix64(value: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's finalizer of int64 bit patterns; shifts are logical."""
    value = value ^ ((value >> 30) & ((1 << 34) - 1))
    value = value.mul_(_MIX_1)
    value = value.bitwise_xor_((value >> 27).bitwise_and_((1 << 37) - 1))
    value = value.mul_(_MIX_2)
    return value.bitwise_xor_((value >> 31).bitwise_and_((1 << 33) - 1))
