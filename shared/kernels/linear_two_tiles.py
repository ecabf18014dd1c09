"""Products of 129 to 192 rows and a weight of 16-bit values, for `linear` and `linear_swiglu`.

Tiles of Triton have 2^n rows, and of one of 256 a quarter or more would not be there. So a program
has two tiles, of 128 and of 64 rows, which share each block of the weight. K is cut and added up as
in the other kernels of products, so that a row's bits are the same.
Grids: (tiles of N, splits); (tiles of F,).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch
from shared.kernels.fp8_rows import row_operand
from shared.kernels.linear_tiles import split_width
from shared.kernels.quantized import load_rows, load_weight
from shared.kernels.swiglu import Activation
from shared.kernels.swiglu_blocks import store_swiglu
from shared.kernels.tensor_blocks import blocks_of

MOST_ROWS = 192
_FIRST_T, _SECOND_T = 128, 64
_BLOCK_N, _BLOCK_K, _NUM_WARPS = 128, 64, 8
# A fourth stage would not fit beside two weights.
_NUM_STAGES, _NUM_SWIGLU_STAGES = 5, 3


@triton.jit(do_not_specialize=["num_rows"])
def _linear_two_tiles_kernel(
    first_desc,  # [T, K] in blocks [FIRST_T, BLOCK_K]
    second_desc,  # [T, K] in blocks [SECOND_T, BLOCK_K]
    weight_desc,  # [N, K] in blocks [BLOCK_N, BLOCK_K]
    bias_ptr,  # [N], unread unless HAS_BIAS
    out_ptr,  # [T, N], or [splits, T, N] f32; mutated
    num_rows,
    width_n,
    width_k,
    DOT_DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST_T: tl.constexpr,
    SECOND_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    first_n = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    wait_for_previous(IS_DEPENDENT)
    first = tl.zeros((BLOCK_N, FIRST_T), dtype=tl.float32)
    second = tl.zeros((BLOCK_N, SECOND_T), dtype=tl.float32)
    begin = split * SPLIT_K
    end = tl.maximum(tl.minimum(begin + SPLIT_K, width_k), begin + 1)  # as in `_linear_kernel`
    tl.assume(begin < end)
    for k in range(begin, end, BLOCK_K):
        weight = load_weight(weight_desc, first_n, k, DOT_DTYPE, SCALING="none")
        first_x = load_rows(first_desc, 0, k, DOT_DTYPE, HAS_FP8_ROWS=False)
        second_x = load_rows(second_desc, FIRST_T, k, DOT_DTYPE, HAS_FP8_ROWS=False)
        first = tl.dot(weight, first_x.T, first, input_precision="ieee")
        second = tl.dot(weight, second_x.T, second, input_precision="ieee")
    out_ptr += split.to(tl.int64) * num_rows * width_n
    _store_sum(out_ptr, bias_ptr, first, 0, first_n, num_rows, width_n, HAS_BIAS)
    _store_sum(out_ptr, bias_ptr, second, FIRST_T, first_n, num_rows, width_n, HAS_BIAS)


@triton.jit
def _store_sum(
    out_ptr, bias_ptr, total, first_t, first_n, num_rows, width_n, HAS_BIAS: tl.constexpr
):
    """Store a block [BLOCK_N, BLOCK_T] of [N, T]; device function."""
    n = first_n + tl.arange(0, total.shape[0])
    t = first_t + tl.arange(0, total.shape[1])
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < width_n, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out_ptr + t.to(tl.int64)[None, :] * width_n + n[:, None],
        total.to(out_ptr.dtype.element_ty),
        mask=(t < num_rows)[None, :] & (n < width_n)[:, None],
    )


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_two_tiles_kernel(
    first_desc,  # [T, K] in blocks [FIRST_T, BLOCK_K]
    second_desc,  # [T, K] in blocks [SECOND_T, BLOCK_K]
    weight_desc,  # [2 F, K] in blocks [BLOCK_N, BLOCK_K], gate above up
    bias_ptr,  # [2 F], unread unless HAS_BIAS
    out_ptr,  # [T, F] mutated
    num_rows,
    width_f,
    width_k,
    DOT_DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST_T: tl.constexpr,
    SECOND_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    first_n = tl.program_id(0) * BLOCK_N
    wait_for_previous(IS_DEPENDENT)
    first_gate = tl.zeros((BLOCK_N, FIRST_T), dtype=tl.float32)
    first_up = tl.zeros((BLOCK_N, FIRST_T), dtype=tl.float32)
    second_gate = tl.zeros((BLOCK_N, SECOND_T), dtype=tl.float32)
    second_up = tl.zeros((BLOCK_N, SECOND_T), dtype=tl.float32)
    for k in range(0, width_k, BLOCK_K):
        first_x = load_rows(first_desc, 0, k, DOT_DTYPE, HAS_FP8_ROWS=False)
        second_x = load_rows(second_desc, FIRST_T, k, DOT_DTYPE, HAS_FP8_ROWS=False)
        gate_weight = load_weight(weight_desc, first_n, k, DOT_DTYPE, SCALING="none")
        up_weight = load_weight(weight_desc, first_n + width_f, k, DOT_DTYPE, SCALING="none")
        first_gate = tl.dot(gate_weight, first_x.T, first_gate, input_precision="ieee")
        second_gate = tl.dot(gate_weight, second_x.T, second_gate, input_precision="ieee")
        first_up = tl.dot(up_weight, first_x.T, first_up, input_precision="ieee")
        second_up = tl.dot(up_weight, second_x.T, second_up, input_precision="ieee")
    _store_swiglu(
        out_ptr, bias_ptr, first_gate, first_up, 0, first_n, num_rows, width_f, HAS_BIAS, ACTIVATION
    )
    _store_swiglu(
        out_ptr,
        bias_ptr,
        second_gate,
        second_up,
        FIRST_T,
        first_n,
        num_rows,
        width_f,
        HAS_BIAS,
        ACTIVATION,
    )


@triton.jit
def _store_swiglu(
    out_ptr,
    bias_ptr,
    gate,
    up,
    first_t,
    first_n,
    num_rows,
    width_f,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Store a block of f(gate) * up, of weights and rows without scales; device function."""
    store_swiglu(
        out_ptr,
        out_ptr,
        out_ptr,
        bias_ptr,
        gate,
        up,
        first_t,
        first_n,
        num_rows,
        width_f,
        SCALING="none",
        HAS_FP8_ROWS=False,
        HAS_BIAS=HAS_BIAS,
        ACTIVATION=ACTIVATION,
        BLOCK_N=gate.shape[0],
        BLOCK_T=gate.shape[1],
    )


def fits_two_tiles(rows: torch.Tensor) -> bool:
    """Return whether these kernels are the fastest for rows [T, K], on a GPU."""
    return rows.element_size() == 2 and _FIRST_T < len(rows) <= MOST_ROWS


def linear_two_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    splits: int,
) -> None:
    """Launch the product of `linear`.

    Args:
        x: [T, K], T <= 192.
        weight: [N, K], dtype of x.
        bias: [N] or None; only if there is one split.
        out: [T, N] if there is one split, else [splits, T, N] f32, addends.
        splits: Of K, see `num_splits`.
    Mutates: `out`, all of it.
    """
    width_n, width_k = weight.shape
    assert len(x) <= MOST_ROWS and (bias is None or splits == 1)
    count_launch("linear")
    _linear_two_tiles_kernel[(triton.cdiv(width_n, _BLOCK_N), splits)](
        *_blocks(x, weight),
        x if bias is None else bias.contiguous(),
        out,
        len(x),
        width_n,
        width_k,
        DOT_DTYPE=row_operand(x, weight).dot,
        HAS_BIAS=bias is not None,
        SPLIT_K=split_width(width_k, splits),
        **_OPTIONS,
        num_stages=_NUM_STAGES,
        **dependent_launch(x),
    )


def linear_swiglu_two_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: Activation,
) -> None:
    """Launch both products of `linear_swiglu`.

    Args:
        x: [T, K], T <= 192.
        weight: [2 F, K], dtype of x.
        bias: [2 F] or None.
        out: [T, F] in the dtype of x.
    Mutates: `out`, all of it.
    """
    width_f, width_k = weight.shape[0] // 2, weight.shape[1]
    assert len(x) <= MOST_ROWS
    count_launch("linear_swiglu")
    _swiglu_two_tiles_kernel[(triton.cdiv(width_f, _BLOCK_N),)](
        *_blocks(x, weight),
        x if bias is None else bias.contiguous(),
        out,
        len(x),
        width_f,
        width_k,
        DOT_DTYPE=row_operand(x, weight).dot,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        **_OPTIONS,
        num_stages=_NUM_SWIGLU_STAGES,
        **dependent_launch(x),
    )


_OPTIONS = {
    "BLOCK_N": _BLOCK_N,
    "FIRST_T": _FIRST_T,
    "SECOND_T": _SECOND_T,
    "BLOCK_K": _BLOCK_K,
    "num_warps": _NUM_WARPS,
}


def _blocks(
    x: torch.Tensor, weight: torch.Tensor
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    return (
        blocks_of(x, _FIRST_T, _BLOCK_K),
        blocks_of(x, _SECOND_T, _BLOCK_K),
        blocks_of(weight, _BLOCK_N, _BLOCK_K),
    )
