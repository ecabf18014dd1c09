"""Root-mean-square normalisation of rows, in float32 inside, alone or after a residual is added,
of their deviations from their mean where a model has LayerNorms without biases.

The program of a row has all of it: it makes the row in FP8, too, for products that want it so.
Grid: (num_rows,).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import aligned, count_launch, use_triton
from shared.kernels.fp8_rows import Fp8Rows, empty_fp8, quantize_rows_ref, store_fp8_row
from shared.kernels.linear import sum_addends_block, sum_addends_ref


@triton.jit
def normalise_block(x, weight, eps, width, dtype: tl.constexpr):
    """Return a row normalised and scaled, f32; `dtype` is rounded to before the weight."""
    mean_square = tl.sum(x * x, axis=0) / width
    normalised = (x * (1.0 / tl.sqrt(mean_square + eps))).to(dtype).to(tl.float32)
    return normalised * weight


@triton.jit
def center_block(x, in_row, width):
    """Return a row without its mean, f32; 0 behind its end."""
    return tl.where(in_row, x - tl.sum(x, axis=0) / width, 0.0)


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [num_rows, h]
    weight_ptr,  # [h], its dtype or f32
    out_ptr,  # [num_rows, h] mutated
    values_ptr,  # [num_rows, h] e4m3 or u8 mutated if HAS_FP8
    scales_ptr,  # [num_rows] f32 mutated if HAS_FP8
    eps,
    IS_CENTERED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_row = column < WIDTH
    x = tl.load(x_ptr + row * WIDTH + column, mask=in_row, other=0.0).to(tl.float32)
    if IS_CENTERED:
        x = center_block(x, in_row, WIDTH)
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    out = normalise_block(x, weight, eps, WIDTH, weight_ptr.dtype.element_ty)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + column, out, mask=in_row)
    if HAS_FP8:
        store_fp8_row(out.to(tl.float32), values_ptr, scales_ptr, row, column, WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x_ptr,  # [num_rows, h]
    addends_ptr,  # [S, num_rows, h] f32
    bias_ptr,  # [h], unread unless HAS_BIAS
    delta_weight_ptr,  # [h], unread unless NORMS_DELTA
    weight_ptr,  # [h], unread unless NORMS_SUM
    sum_ptr,  # [num_rows, h] mutated
    out_ptr,  # [num_rows, h] mutated if NORMS_SUM
    values_ptr,  # [num_rows, h] e4m3 or u8 mutated if HAS_FP8
    scales_ptr,  # [num_rows] f32 mutated if HAS_FP8
    num_rows,
    eps,
    IS_CENTERED: tl.constexpr,
    HAS_FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMS_DELTA: tl.constexpr,
    NORMS_SUM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_row = column < WIDTH
    offset = row * WIDTH + column
    dtype = sum_ptr.dtype.element_ty
    split_stride = num_rows.to(tl.int64) * WIDTH
    delta = sum_addends_block(addends_ptr, offset, split_stride, in_row, NUM_SPLITS)
    if HAS_BIAS:
        delta += tl.load(bias_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    if NORMS_DELTA:
        delta = delta.to(dtype).to(tl.float32)
        weight = tl.load(delta_weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
        delta = normalise_block(delta, weight, eps, WIDTH, delta_weight_ptr.dtype.element_ty)
    x = tl.load(x_ptr + offset, mask=in_row, other=0.0).to(tl.float32)
    x = (x + delta.to(dtype).to(tl.float32)).to(dtype)
    tl.store(sum_ptr + offset, x, mask=in_row)
    if NORMS_SUM:
        weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
        wide = x.to(tl.float32)
        if IS_CENTERED:
            wide = center_block(wide, in_row, WIDTH)
        out = normalise_block(wide, weight, eps, WIDTH, weight_ptr.dtype.element_ty)
        x = out.to(dtype)
        tl.store(out_ptr + offset, x, mask=in_row)
    if HAS_FP8:
        store_fp8_row(x.to(tl.float32), values_ptr, scales_ptr, row, column, WIDTH)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, is_centered: bool = False
) -> torch.Tensor:
    """Normalise every row by its root mean square and scale it.

    Args:
        x: [..., h].
        weight: [h], dtype of x or f32; normalised values are rounded to it before they are scaled.
        eps: Added to the mean square.
        is_centered: A row's mean is taken off it first, as LayerNorm does.
    Returns: [..., h] in the dtype of x.
    Source: LlamaRMSNorm of transformers; with a weight in f32 those of Olmo2 and Gemma, and
        CohereLayerNorm.
    """
    if not use_triton(x):
        return rms_norm_ref(x, weight, eps, is_centered=is_centered)
    x = aligned(x)
    out = torch.empty_like(x)
    _launch_norm(x, weight, eps, out, None, is_centered=is_centered)
    return out


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, is_centered: bool = False
) -> Fp8Rows:
    """Return what `rms_norm` returns, and the same in FP8.

    Args:
        x: [T, h] of 16 bits.
    """
    if not use_triton(x):
        return quantize_rows_ref(rms_norm_ref(x, weight, eps, is_centered=is_centered))
    x = aligned(x)
    fp8 = empty_fp8(torch.empty_like(x))
    _launch_norm(x, weight, eps, fp8.rows, fp8, is_centered=is_centered)
    return fp8


def _launch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    fp8: Fp8Rows | None,
    *,
    is_centered: bool,
) -> None:
    """Launch the norm. Mutates: `out` and `fp8`, all of them."""
    assert weight.dtype in (x.dtype, torch.float32) and weight.is_contiguous()
    width = x.shape[-1]
    num_rows = x.numel() // width
    if num_rows == 0:
        return
    count_launch("rms_norm")
    _rms_norm_kernel[(num_rows,)](
        x,
        weight,
        out,
        out if fp8 is None else fp8.values,
        out if fp8 is None else fp8.scales,
        eps,
        IS_CENTERED=is_centered,
        HAS_FP8=fp8 is not None,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
        **dependent_launch(x),
    )


def add_rms_norm(
    x: torch.Tensor,
    addends: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    delta_weight: torch.Tensor | None = None,
    *,
    is_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a product to the residual stream and normalise the sum.

    Args:
        x: [T, h], the residual stream.
        addends: [S, T, h] f32, see `linear_addends`; their sum is rounded to the dtype of x.
        bias: [h] of the product, or None.
        weight: [h] of the norm, see `rms_norm`; None: the sum is not normalised.
        eps: Added to the mean square.
        delta_weight: [h] of a norm of the product, before it is added; None: there is none.
        is_centered: Of the norm of the sum, see `rms_norm`.
    Returns: (sum [T, h], normalised sum [T, h], or the sum again), in the dtype of x.
    """
    if not use_triton(x):
        return add_rms_norm_ref(
            x, addends, bias, weight, eps, delta_weight, is_centered=is_centered
        )
    x = aligned(x)
    total = torch.empty_like(x)
    out = total if weight is None else torch.empty_like(x)
    _launch_add_norm(
        x, addends, bias, weight, eps, delta_weight, total, out, None, is_centered=is_centered
    )
    return total, out


def add_rms_norm_fp8(
    x: torch.Tensor,
    addends: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    delta_weight: torch.Tensor | None = None,
    *,
    is_centered: bool = False,
) -> tuple[torch.Tensor, Fp8Rows]:
    """Return what `add_rms_norm` returns, the second of it in FP8 as well.

    Args:
        x: [T, h] of 16 bits.
    """
    if not use_triton(x):
        total, out = add_rms_norm_ref(
            x, addends, bias, weight, eps, delta_weight, is_centered=is_centered
        )
        return total, quantize_rows_ref(out)
    x = aligned(x)
    total = torch.empty_like(x)
    fp8 = empty_fp8(total if weight is None else torch.empty_like(x))
    _launch_add_norm(
        x, addends, bias, weight, eps, delta_weight, total, fp8.rows, fp8, is_centered=is_centered
    )
    return total, fp8


def _launch_add_norm(
    x: torch.Tensor,
    addends: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    delta_weight: torch.Tensor | None,
    total: torch.Tensor,
    out: torch.Tensor,
    fp8: Fp8Rows | None,
    *,
    is_centered: bool,
) -> None:
    """Launch the sum and its norm. Mutates: `total`, `out` and `fp8`, all of them."""
    for one in (weight, delta_weight):
        assert one is None or (one.dtype in (x.dtype, torch.float32) and one.is_contiguous())
    assert addends.is_contiguous()
    assert addends.shape[1:] == x.shape and addends.dtype == torch.float32
    num_rows, width = x.shape
    if num_rows == 0:
        return
    count_launch("add_rms_norm")
    _add_rms_norm_kernel[(num_rows,)](
        x,
        addends,
        x if bias is None else bias,
        x if delta_weight is None else delta_weight,
        x if weight is None else weight,
        total,
        out,
        out if fp8 is None else fp8.values,
        out if fp8 is None else fp8.scales,
        num_rows,
        eps,
        IS_CENTERED=is_centered,
        HAS_FP8=fp8 is not None,
        HAS_BIAS=bias is not None,
        NORMS_DELTA=delta_weight is not None,
        NORMS_SUM=weight is not None,
        NUM_SPLITS=len(addends),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8 if width > 2048 else 4,
        **dependent_launch(x),
    )


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, is_centered: bool = False
) -> torch.Tensor:
    """Do what `rms_norm` does in plain torch."""
    wide = x.float().contiguous()  # a mean over strided rows adds in another order
    if is_centered:
        wide = wide - wide.mean(-1, keepdim=True)
    mean_square = (wide * wide).mean(-1, keepdim=True)
    return (weight * (wide * torch.rsqrt(mean_square + eps)).to(weight.dtype)).to(x.dtype)


def add_rms_norm_ref(
    x: torch.Tensor,
    addends: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    delta_weight: torch.Tensor | None = None,
    *,
    is_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `add_rms_norm` does in plain torch."""
    delta = sum_addends_ref(addends, bias, x.dtype)
    if delta_weight is not None:
        delta = rms_norm_ref(delta, delta_weight, eps)
    total = x + delta
    if weight is None:
        return total, total
    return total, rms_norm_ref(total, weight, eps, is_centered=is_centered)
