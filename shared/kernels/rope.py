"""Rotary position embedding in the half-rotation layout of Llama."""

from __future__ import annotations

import torch


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + d/2]) of every head by its row's angle.

    Args:
        x: [T, H, d].
        cos: [T, d/2] f32.
        sin: [T, d/2] f32.
    Returns: [T, H, d] in the dtype of x, computed in float32.
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, d/2]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
