"""Matrix product whose rows do not depend on each other: y = x W^T + b.

Grid: (tiles of N, tiles of T). The weights are the wide operand of every dot and the tokens the
narrow one, in tiles of one size per dtype, and K is walked in one order: 1 row and 1000 rows run
the same instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from shared.kernels.dispatch import LAUNCH_OPTIONS, count_launch, dot_dtype, use_triton

# Rows of one CPU product. BLAS picks another order of accumulation for another height.
CPU_ROW_TILE = 8

# (BLOCK_N, BLOCK_T, BLOCK_K) by bytes per value.
_BLOCKS = {4: (64, 32, 32), 2: (64, 64, 64)}


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K], in either memory order
    bias_ptr,  # [N], unread unless HAS_BIAS
    out_ptr,  # [T, N] mutated
    num_rows,
    width_n,
    width_k,
    x_stride,
    weight_n_stride,
    weight_k_stride,
    DOT_DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    in_n = n < width_n
    in_t = t < num_rows
    acc = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in range(0, width_k, BLOCK_K):
        in_k = start + k < width_k
        weight = tl.load(
            weight_ptr + n[:, None] * weight_n_stride + (start + k)[None, :] * weight_k_stride,
            mask=in_n[:, None] & in_k[None, :],
            other=0.0,
        )  # [BLOCK_N, BLOCK_K]
        x = tl.load(
            x_ptr + t[None, :] * x_stride + (start + k)[:, None],
            mask=in_t[None, :] & in_k[:, None],
            other=0.0,
        )  # [BLOCK_K, BLOCK_T]
        acc = tl.dot(weight.to(DOT_DTYPE), x.to(DOT_DTYPE), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out_ptr + t[None, :] * width_n + n[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=in_t[None, :] & in_n[:, None],
    )


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
    if not use_triton(x):
        return linear_ref(x, weight, bias, out_dtype=out_dtype)
    assert x.dtype == weight.dtype and x.shape[1] == weight.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, width_n = x.shape[0], weight.shape[0]
    out = torch.empty((num_rows, width_n), dtype=out_dtype or x.dtype, device=x.device)
    block_n, block_t, block_k = _BLOCKS[x.element_size()]
    grid = (triton.cdiv(width_n, block_n), triton.cdiv(num_rows, block_t))
    if num_rows == 0:
        return out
    count_launch("linear")
    _linear_kernel[grid](
        x,
        weight,
        weight if bias is None else bias.contiguous(),
        out,
        num_rows,
        width_n,
        x.shape[1],
        x.stride(0),
        *weight.stride(),
        DOT_DTYPE=dot_dtype(x),
        HAS_BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )
    return out


def linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Do what `linear` does, in tiles of CPU_ROW_TILE zero-padded rows."""
    dtype = out_dtype or x.dtype
    num_rows, width_n = x.shape[0], weight.shape[0]
    padding = -num_rows % CPU_ROW_TILE
    # BLAS adds in another order for transposed operands.
    x, weight = x.float().contiguous(), weight.float().t()
    bias = None if bias is None else bias.float()
    if padding:
        x = functional.pad(x, (0, 0, 0, padding))
    if len(x) == CPU_ROW_TILE:
        out = torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
        return (out[:num_rows] if padding else out).to(dtype)
    out = x.new_empty((num_rows + padding, width_n))
    tiles = x.view(-1, CPU_ROW_TILE, x.shape[1]).unbind()
    out_tiles = out.view(-1, CPU_ROW_TILE, width_n).unbind()
    for tile, out_tile in zip(tiles, out_tiles, strict=True):
        if bias is None:
            torch.mm(tile, weight, out=out_tile)
        else:
            torch.addmm(bias, tile, weight, out=out_tile)
    return (out[:num_rows] if padding else out).to(dtype)
