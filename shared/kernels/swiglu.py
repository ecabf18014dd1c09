"""Gated activations of MLPs."""

from __future__ import annotations

import math
from typing import Literal

import torch

from shared.kernels.vector_math import settle_vector_math

Activation = Literal["silu", "gelu_tanh"]

# gelu's tanh, written by the logistic function of twice its argument:
# 0.5 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) = 1 / (1 + exp(-(A x + B x^3))).
GELU_A = 2 * math.sqrt(2 / math.pi)
GELU_B = GELU_A * 0.044715


def swiglu(gate: torch.Tensor, up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Return activation(gate) * up, computed in float32.

    Written as x / (1 + exp(-y)): torch's silu rounds the tail of a vector differently on a CPU, so
    that its bits depend on the row count.

    Args:
        gate: [T, h].
        up: [T, h].
        activation: "gelu_tanh": the approximation of gelu by tanh.
    Returns: [T, h] in the dtype of gate.
    """
    settle_vector_math()
    wide = gate.float()
    inner = wide if activation == "silu" else wide * (GELU_A + GELU_B * wide * wide)
    return (wide / (1 + torch.exp(-inner)) * up.float()).to(gate.dtype)


def logistic(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / (1 + exp(-x)) of f32 values; written like that on a CPU, see `swiglu`."""
    if x.is_cuda:
        return torch.sigmoid(x)
    settle_vector_math()
    return 1 / (1 + torch.exp(-x))


def clamped_swiglu(
    gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float
) -> torch.Tensor:
    """Return gate * sigmoid(alpha * gate) * (up + 1), where gate <= limit and |up| <= limit.

    Args:
        gate: [T, h] f32.
        up: [T, h] f32.
    Returns: [T, h] f32.
    Source: transformers' GptOssExperts.
    """
    settle_vector_math()
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
