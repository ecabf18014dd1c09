"""Matrix products head by head, whose rows do not depend on each other: y_h = x_h W_h^T.

As in `linear`, weights are the wide operand of every dot and tokens the narrow one; K is walked
from its begin to its end, in steps of one length.

Grid: (tiles of T, tiles of N, heads).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, dot_dtype
from shared.kernels.products_cpu import CpuProducts, CpuWeight

HeadWeights = torch.Tensor | Sequence[CpuWeight]

BLOCK_N, BLOCK_K = 64, 64
_MAX_BLOCK_T = 128


@triton.jit(do_not_specialize=["num_rows"])
def _head_linear_kernel(
    x_ptr,  # [T, H, K], rows and heads apart as the strides say
    weight_ptr,  # [H, N, K]
    out_ptr,  # [T, H, N] mutated, likewise
    num_rows,
    x_stride,
    x_head_stride,
    out_stride,
    out_head_stride,
    DOT_DTYPE: tl.constexpr,
    WIDTH_N: tl.constexpr,
    WIDTH_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    wait_for_previous(IS_DEPENDENT)
    row = t.to(tl.int64)
    x_ptr += head * x_head_stride
    weight_ptr += head * (WIDTH_N * WIDTH_K)
    acc = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for first in range(0, WIDTH_K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        weight_ptrs = weight_ptr + n[:, None] * WIDTH_K + k[None, :]
        in_weight = (n < WIDTH_N)[:, None] & (k < WIDTH_K)[None, :]
        weight = tl.load(weight_ptrs, mask=in_weight, other=0.0).to(DOT_DTYPE)
        in_x = (t < num_rows)[:, None] & (k < WIDTH_K)[None, :]
        x_ptrs = x_ptr + row[:, None] * x_stride + k[None, :]
        x = tl.load(x_ptrs, mask=in_x, other=0.0).to(DOT_DTYPE)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    out_ptrs = out_ptr + head * out_head_stride + row[None, :] * out_stride + n[:, None]
    in_out = (t < num_rows)[None, :] & (n < WIDTH_N)[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_out)


def head_weights(products: CpuProducts, weights: torch.Tensor) -> HeadWeights:
    """Return weights [H, N, K] as `head_linear` reads them: packed, if a CPU computes with them."""
    packed = [products.weight(weight) for weight in weights]
    return [one for one in packed if isinstance(one, CpuWeight)] or weights.contiguous()


def head_linear(x: torch.Tensor, weights: HeadWeights, out: torch.Tensor) -> None:
    """Multiply rows by a weight of each head; a row's bits do not depend on the other rows.

    Args:
        x: [T, H, K], dense in K.
        weights: What `head_weights` returned of [H, N, K], dtype of x.
        out: [T, H, N], dense in N, dtype of x.
    Mutates: `out`, all of it.
    """
    if not isinstance(weights, torch.Tensor):
        head_linear_cpu(x, weights, out)
        return
    num_rows, num_heads, width_k = x.shape
    width_n = weights.shape[1]
    assert weights.shape == (num_heads, width_n, width_k) and out.shape == (*x.shape[:2], width_n)
    assert x.dtype == weights.dtype == out.dtype and weights.is_contiguous()
    assert x.stride(2) == 1 and out.stride(2) == 1
    if num_rows == 0:
        return
    block_t = tile_rows(num_rows, x)
    count_launch("head_linear")
    _head_linear_kernel[(triton.cdiv(num_rows, block_t), triton.cdiv(width_n, BLOCK_N), num_heads)](
        x,
        weights,
        out,
        num_rows,
        *x.stride()[:2],
        *out.stride()[:2],
        DOT_DTYPE=dot_dtype(x),
        WIDTH_N=width_n,
        WIDTH_K=width_k,
        BLOCK_N=BLOCK_N,
        BLOCK_T=block_t,
        BLOCK_K=BLOCK_K,
        num_warps=4,
        num_stages=3,
        **dependent_launch(x),
    )


def tile_rows(num_rows: int, x: torch.Tensor) -> int:
    """Return the rows of a tile; of what interprets kernels, and of float32, it is always one."""
    if not x.is_cuda or x.element_size() == 4:
        return 32
    return min(_MAX_BLOCK_T, max(16, triton.next_power_of_2(num_rows)))


def head_linear_cpu(x: torch.Tensor, weights: Sequence[CpuWeight], out: torch.Tensor) -> None:
    """Do what `head_linear` does on a CPU."""
    for head, weight in enumerate(weights):
        out[:, head] = weight.multiply(x[:, head])


def head_linear_ref(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Do what `head_linear` does in plain torch."""
    out.copy_(torch.einsum("thk,hnk->thn", x.double(), weights.double()))
