"""The first half of a gated MLP: silu(x Wg^T + bg) * (x Wu^T + bu), rows independent of each other.

One program computes the same outputs of both products, so that nothing but the result is stored.
The K schedule is that of `linear` with one split. Grid: (tiles of T, tiles of F).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, dot_dtype, use_triton
from shared.kernels.linear import INTERPRETED_TILES, Tiles, blocks_of
from shared.kernels.products_cpu import CpuWeight, Weight, linear_cpu
from shared.kernels.swiglu import swiglu


def choose_tiles(num_rows: int, element_size: int) -> Tiles:
    """Return a GPU's tiles of both products; none of it changes a bit."""
    if element_size == 4:
        return Tiles(64, 32, 32, 4, 2)
    if num_rows <= 16:
        return Tiles(64, 16, 64, 4, 5)
    if num_rows <= 32:
        return Tiles(64, 32, 64, 4, 5)
    if num_rows <= 64:
        return Tiles(64, 64, 64, 4, 4)
    return Tiles(64, 128, 64, 4, 3) if num_rows <= 128 else Tiles(128, 128, 64, 8, 4)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_swiglu_kernel(
    x_desc,  # [T, K] in blocks [BLOCK_T, BLOCK_K]
    weight_desc,  # [2 F, K] in blocks [BLOCK_N, BLOCK_K], gate above up
    bias_ptr,  # [2 F], unread unless HAS_BIAS
    out_ptr,  # [T, F] mutated
    num_rows,
    width_f,
    width_k,
    DOT_DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    first_t = tl.program_id(0) * BLOCK_T
    first_n = tl.program_id(1) * BLOCK_N
    wait_for_previous(IS_DEPENDENT)
    gate = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for k in range(0, width_k, BLOCK_K):
        x = x_desc.load([first_t, k]).to(DOT_DTYPE)
        gate_weight = weight_desc.load([first_n, k]).to(DOT_DTYPE)
        up_weight = weight_desc.load([first_n + width_f, k]).to(DOT_DTYPE)
        gate = tl.dot(gate_weight, x.T, gate, input_precision="ieee")
        up = tl.dot(up_weight, x.T, up, input_precision="ieee")
    t = first_t + tl.arange(0, BLOCK_T)
    n = first_n + tl.arange(0, BLOCK_N)
    in_n = n < width_f
    if HAS_BIAS:
        gate += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + width_f + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    dtype = out_ptr.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    out = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    out_ptrs = out_ptr + t.to(tl.int64)[None, :] * width_f + n[:, None]
    tl.store(out_ptrs, out.to(dtype), mask=(t < num_rows)[None, :] & in_n[:, None])


def linear_swiglu(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return silu(gate) * up of two products; a row's bits do not depend on the other rows.

    Args:
        x: [T, K].
        weight: [2 F, K], the rows of gate above those of up; dtype of x; see `linear`.
        bias: [2 F] or None.
    Returns: [T, F] in the dtype of x; gate and up are rounded to it before they are combined.
    """
    if isinstance(weight, CpuWeight) or not use_triton(x):
        return linear_swiglu_cpu(x, weight, bias)
    assert x.dtype == weight.dtype and x.shape[1] == weight.shape[1]
    num_rows, width_f, width_k = x.shape[0], weight.shape[0] // 2, weight.shape[1]
    out = torch.empty((num_rows, width_f), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tiles = choose_tiles(num_rows, x.element_size()) if x.is_cuda else INTERPRETED_TILES
    grid = (triton.cdiv(num_rows, tiles.block_t), triton.cdiv(width_f, tiles.block_n))
    count_launch("linear_swiglu")
    _linear_swiglu_kernel[grid](
        blocks_of(x, tiles.block_t, tiles.block_k),
        blocks_of(weight, tiles.block_n, tiles.block_k),
        weight if bias is None else bias.contiguous(),
        out,
        num_rows,
        width_f,
        width_k,
        DOT_DTYPE=dot_dtype(x),
        HAS_BIAS=bias is not None,
        BLOCK_N=tiles.block_n,
        BLOCK_T=tiles.block_t,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **dependent_launch(x),
    )
    return out


def linear_swiglu_cpu(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what `linear_swiglu` does on a CPU."""
    gate, up = linear_cpu(x, weight, bias).chunk(2, dim=-1)
    return swiglu(gate, up)
