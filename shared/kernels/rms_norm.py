"""Root-mean-square normalisation of rows, in float32 inside."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise every row by its root mean square and scale it.

    Args:
        x: [..., h].
        weight: [h].
        eps: Added to the mean square.
    Returns: [..., h] in the dtype of x.
    Source: LlamaRMSNorm of transformers (rounds to the dtype of x before the weight).
    """
    return rms_norm_ref(x, weight, eps)


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Do what `rms_norm` does in plain torch."""
    wide = x.float()
    mean_square = (wide * wide).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)
