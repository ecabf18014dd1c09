"""A product out of single IEEE multiplications and additions: the same bits on every CPU.

Nothing here may be contracted or reordered: no addcmul, sum or matmul, whose bits are a library's.
"""

from __future__ import annotations

import torch

# Partial sums per output: lane l adds the products of k = l, l + LANES, ... in order, then lanes
# are halved until one is left. Zeros after the last k therefore change nothing.
LANES = 16
# Values of one block's partial sums, so that they stay in the cache.
_BLOCK_VALUES = 1 << 17
_BLOCK_ROWS = 64


def multiply_elementwise(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply batches of matrices, K first.

    Args:
        a: [K, B, M] f32, K a multiple of LANES.
        b: [K, B or 1, N] f32.
        out: [B, M, N] f32.
    Mutates: `out`, all of it.
    """
    num_items, num_rows, width = out.shape
    for row in range(0, num_rows, _BLOCK_ROWS):
        rows = slice(row, row + _BLOCK_ROWS)
        height = LANES * num_items * min(num_rows - row, _BLOCK_ROWS)
        step = max(16, _BLOCK_VALUES // height)
        for column in range(0, width, step):
            columns = slice(column, column + step)
            out[:, rows, columns] = _multiply_block(a[:, :, rows, None], b[:, :, None, columns])


def _multiply_block(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return [B, M, N] of a [K, B, M, 1] and b [K, B, 1, N]."""
    sums = a[:LANES] * b[:LANES]
    addend = torch.empty_like(sums)
    for k in range(LANES, len(a), LANES):
        torch.mul(a[k : k + LANES], b[k : k + LANES], out=addend)
        sums.add_(addend)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return sums[0]
