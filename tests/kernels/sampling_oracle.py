"""Gumbel noise and sampling in plain Python, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """Return SplitMix64's finalizer."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def noise(seed: int, position: int, token_id: int) -> np.float32:
    """Return the noise of one token."""
    key = mix64((seed & MASK) ^ mix64((position + GOLDEN) & MASK))
    bits = mix64((key + (token_id + 1) * GOLDEN) & MASK)
    uniform = ((bits >> 11) + 0.5) * 2.0**-53
    return np.float32(-math.log(-math.log(uniform)))


def kept_ids(x: Sequence[np.float32], top_k: int, top_p: float, min_p: float) -> list[int]:
    """Return the ids that top-k, top-p and min-p leave, best first."""
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if top_k:
        order = order[:top_k]
    largest = float(x[order[0]])

    def mass(token_id: int) -> int:
        value = float(x[token_id])
        relative = 1.0 if value == largest else math.exp(value - largest)
        return math.floor(relative * 2.0**40 + 0.5)

    if top_p < 1:
        needed = max(1, math.ceil(top_p * float(sum(map(mass, order)))))
        kept, total = [], 0
        for token_id in order:
            if total >= needed:
                break
            kept.append(token_id)
            total += mass(token_id)
        order = kept
    least = math.floor(min_p * 2.0**40 + 0.5)
    return [token_id for token_id in order if mass(token_id) >= least]


def sample_row(
    logits: Sequence[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> int:
    """Return the token of one row."""
    values = [np.float32(-np.inf if math.isnan(value) else value) for value in logits]
    if temperature == 0:
        return max(range(len(values)), key=lambda i: (values[i], -i))
    with np.errstate(over="ignore"):  # an overflow is the infinity that it should be
        x = [value / np.float32(temperature) for value in values]
    kept = kept_ids(x, top_k, top_p, min_p)
    noisy = {i: np.float32(x[i] + noise(seed, position, i)) for i in kept}
    best = max(noisy, key=lambda i: (noisy[i], -i))
    return best if noisy[best] > -np.inf else 0
