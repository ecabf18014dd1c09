"""Soft limit of logits: limit * tanh(x / limit)."""

from __future__ import annotations

import torch

from shared.kernels.vector_math import settle_vector_math


def softcap_(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Bend values into (-limit, limit), in place.

    Written as 1 - 2 / (exp(2 y) + 1) on a CPU: whether its tanh rounds the tail of a vector as it
    does the rest is not known.

    Args:
        x: [R, V] f32.
        limit: > 0.
    Returns: x.
    Mutates: x.
    """
    if x.is_cuda:
        return x.div_(limit).tanh_().mul_(limit)
    settle_vector_math()
    return x.mul_(2 / limit).exp_().add_(1).reciprocal_().mul_(-2 * limit).add_(limit)
