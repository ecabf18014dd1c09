"""Matrix product whose rows do not depend on each other: y = x W^T + b."""

from __future__ import annotations

import torch
from torch.nn import functional

# Rows of one CPU product. BLAS picks another order of accumulation for another height.
CPU_ROW_TILE = 8


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply rows by a weight; a row's bits do not depend on the other rows or their number.

    Args:
        x: [T, K].
        weight: [N, K], dtype of x.
        bias: [N] or None.
        out_dtype: dtype of the result; None: that of x.
    Returns: [T, N], accumulated in float32.
    """
    return linear_ref(x, weight, bias, out_dtype=out_dtype)


def linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Do what `linear` does, in tiles of CPU_ROW_TILE zero-padded rows."""
    dtype = out_dtype or x.dtype
    x, weight = x.float(), weight.float()
    bias = None if bias is None else bias.float()
    num_rows = x.shape[0]
    padding = -num_rows % CPU_ROW_TILE
    if padding:
        x = functional.pad(x, (0, 0, 0, padding))
    tiles = [functional.linear(tile, weight, bias) for tile in x.split(CPU_ROW_TILE)]
    if not tiles:
        return x.new_empty((0, weight.shape[0]), dtype=dtype)
    out = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
    return out[:num_rows].to(dtype)
