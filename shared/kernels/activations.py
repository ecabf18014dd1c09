"""Activations of MLPs without a gate in float32, a value at a time: its bits depend on no other."""

from __future__ import annotations

import torch

from shared.kernels.vector_math import settle_vector_math


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return the squares of values above 0, and 0 for others. [T, h] f32."""
    above = x.clamp(min=0)
    return above * above


def xielu(
    x: torch.Tensor,
    *,
    of_square: torch.Tensor,
    of_exponential: torch.Tensor,
    of_value: torch.Tensor,
    largest: torch.Tensor,
) -> torch.Tensor:
    """Return a x^2 + b x for values above 0, and c (exp(x) - 1 - x) + b x for others.

    Args:
        x: [T, h] f32.
        of_square: a, [1] f32.
        of_exponential: c, [1] f32.
        of_value: b, [] f32.
        largest: [] f32 below 0, where the exponential ends.
    Returns: [T, h] f32.
    Source: arXiv:2411.13010; transformers' XIELUActivation.
    """
    settle_vector_math()
    below = (torch.expm1(torch.minimum(x, largest)) - x) * of_exponential
    return torch.where(x > 0, of_square * x * x, below) + of_value * x
