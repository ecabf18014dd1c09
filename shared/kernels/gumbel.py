"""Counter-based Gumbel noise: a pure function of (seed, position, token id)."""

from __future__ import annotations

import torch

# Constants of SplitMix64 as signed 64-bit bit patterns.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _mix64(value: torch.Tensor) -> torch.Tensor:
    """Return the SplitMix64 finalizer of int64 bit patterns; shifts are logical."""
    value = value ^ ((value >> 30) & ((1 << 34) - 1))
    value = value.mul_(_MIX_1)
    value = value.bitwise_xor_((value >> 27).bitwise_and_((1 << 37) - 1))
    value = value.mul_(_MIX_2)
    return value.bitwise_xor_((value >> 31).bitwise_and_((1 << 33) - 1))


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise for token ids at absolute positions.

    Args:
        seed: [R] i64, the bit pattern of the request's unsigned seed.
        position: [R] i64. Absolute position of the token being sampled.
        ids: [V] or [R, K] i64. Target token ids.
    Returns: [R, V] or [R, K] f32, the rounding of a float64 value; u has 53 bits.
    Source: SplitMix64, Steele, Lea and Flood 2014.
    """
    key = _mix64(seed ^ _mix64(position + _GOLDEN))  # [R]
    bits = _mix64(key.unsqueeze(-1) + (ids + 1) * _GOLDEN)
    uniform = (bits >> 11).bitwise_and_((1 << 53) - 1).to(torch.float64)
    uniform.add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)
