"""Seeds that give a chosen token chosen noise: SplitMix64 is a bijection and can be undone."""

from __future__ import annotations

import torch

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(z: int) -> int:
    """Return SplitMix64's finalizer."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def seed_for_hash(bits: int, position: int, token_id: int) -> int:
    """Return the seed with which the 64 random bits of one token at one position are `bits`.

    Returns: int in [0, 2^64).
    """
    key = (_unmix64(bits) - (token_id + 1) * GOLDEN) & MASK
    return _unmix64(key) ^ mix64((position + GOLDEN) & MASK)


def lucky_seed(token_id: int, position: int = 0) -> int:
    """Return a seed with which one token has noise 36, so that it is sampled if it may be."""
    return seed_for_hash(MASK, position, token_id)


def int64(values: list[int], device: torch.device) -> torch.Tensor:
    """Return unsigned 64-bit values as the int64 tensor with their bit patterns."""
    signed = [value - (1 << 64) if value >> 63 else value for value in values]
    return torch.tensor(signed, dtype=torch.int64).to(device)


def _unmix64(z: int) -> int:
    z ^= (z >> 31) ^ (z >> 62)
    z = (z * pow(0x94D049BB133111EB, -1, 1 << 64)) & MASK
    z ^= (z >> 27) ^ (z >> 54)
    z = (z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & MASK
    return z ^ (z >> 30) ^ (z >> 60)
