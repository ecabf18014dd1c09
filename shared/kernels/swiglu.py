"""Gated activation of Llama's MLP."""

from __future__ import annotations

import torch

from shared.kernels.vector_math import settle_vector_math


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, computed in float32.

    Written as x / (1 + exp(-x)): torch's silu rounds the tail of a vector differently on a CPU, so
    that its bits depend on the row count.

    Args:
        gate: [T, h].
        up: [T, h].
    Returns: [T, h] in the dtype of gate.
    """
    settle_vector_math()
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide)) * up.float()).to(gate.dtype)
