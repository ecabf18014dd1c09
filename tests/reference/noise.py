"""Counter-based Gumbel noise in Python integers and floats."""

from __future__ import annotations

import math
import struct

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def gumbel(seed: int, position: int, token_id: int) -> float:
    """Return the noise of one token at one absolute position, rounded to float32.

    Source: SplitMix64's finalizer (Steele, Lea, Flood 2014) over seed, position and id.
    """
    key = _mix64((seed & _MASK) ^ _mix64((position + _GOLDEN) & _MASK))
    bits = _mix64((key + (token_id + 1) * _GOLDEN) & _MASK)
    uniform = (min(bits >> 11, (1 << 53) - 2) + 0.5) * 2.0**-53
    noise = -math.log(-math.log(uniform))
    return struct.unpack("f", struct.pack("f", noise))[0]


def _mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
