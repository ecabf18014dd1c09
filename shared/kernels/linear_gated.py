"""Gate rows by a product of others: f(x W^T) * rows. Grid: (T, blocks of F).

The kernel adds up what `linear_addends` leaves, and gates on its way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton
from shared.kernels.linear import linear_addends, sum_addends_block
from shared.kernels.products_cpu import CpuWeight, Weight, linear_cpu
from shared.kernels.swiglu import Activation, swiglu
from shared.kernels.swiglu_blocks import combine


@triton.jit
def _gate_rows_kernel(
    addends_ptr,  # [S, T, F] f32
    rows_ptr,  # [T, F]
    out_ptr,  # [T, F] mutated
    num_values,  # T * F
    rows_stride,
    width_f,
    ACTIVATION: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_n = n < width_f
    wait_for_previous(IS_DEPENDENT)
    gate = sum_addends_block(addends_ptr, row * width_f + n, num_values, in_n, NUM_SPLITS)
    rows = tl.load(rows_ptr + row * rows_stride + n, mask=in_n, other=0.0)
    out = combine(gate, rows, out_ptr.dtype.element_ty, ACTIVATION)
    tl.store(out_ptr + row * width_f + n, out, mask=in_n)


def linear_gated(
    x: torch.Tensor, weight: Weight, rows: torch.Tensor, activation: Activation = "silu"
) -> torch.Tensor:
    """Return f(x W^T) * rows; a row's bits do not depend on the other rows.

    Args:
        x: [T, K].
        weight: [F, K], dtype of x; see `linear`.
        rows: [T, F], dtype of x; each of them dense.
        activation: f, see `swiglu`.
    Returns: [T, F] in the dtype of x; the product is rounded to it before it is activated.
    """
    if isinstance(weight, CpuWeight) or not use_triton(x):
        return linear_gated_cpu(x, weight, rows, activation)
    num_rows, width_f = rows.shape
    assert num_rows == len(x) and rows.dtype == x.dtype and rows.stride(1) == 1
    out = torch.empty((num_rows, width_f), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    addends = linear_addends(x, weight)
    count_launch("linear_gated")
    block = 256
    _gate_rows_kernel[(num_rows, triton.cdiv(width_f, block))](
        addends,
        rows,
        out,
        addends.stride(0),
        rows.stride(0),
        width_f,
        ACTIVATION=activation,
        NUM_SPLITS=len(addends),
        BLOCK=block,
        num_warps=4,
        **dependent_launch(addends),
    )
    return out


def linear_gated_cpu(
    x: torch.Tensor, weight: Weight, rows: torch.Tensor, activation: Activation = "silu"
) -> torch.Tensor:
    """Do what `linear_gated` does on a CPU."""
    return swiglu(linear_cpu(x, weight), rows, activation)
