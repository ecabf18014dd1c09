"""Rows in FP8 (e4m3): what is multiplied by weights in FP8 whose rows are to be so as well.

A row is divided by its largest magnitude / 448, which is its scale: its bytes and its scale are a
function of that row alone. (One scale for a row, where DeepSeek-V3 has one for 128 values of it:
e4m3 has an exponent of its own, so that values down to 1 / 28672 of the largest one keep all of
their bits.) A kernel multiplies e4m3 by e4m3 and scales rows at the end of each split of K.

A kernel that makes rows makes their FP8, too, if whoever reads them wants it; what no such kernel
made is quantised before its products, once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, dot_dtype, multiplies_fp8, use_triton
from shared.kernels.fp8_cache import to_e4m3
from shared.kernels.fp8_experts import QuantizedExperts
from shared.kernels.quantized import E4M3_MAX, QuantizedWeight

_MAX = tl.constexpr(E4M3_MAX)
# Rows of nothing larger become zeros: the inverse of their scale might be no number.
_LEAST = tl.constexpr(2.0**-100)
# Of float32.
_INFINITY_BITS = tl.constexpr(0x7F800000)
# Values of 16 bits that a thread loads at once.
_THREAD_VALUES = tl.constexpr(8)
# So few rows leave a GPU idle: a program each, as quick as can be; more are to keep it busy.
_FEW_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Rows:
    """Rows, and the same in FP8: a product reads what its weight wants.

    Args:
        rows: [T, K], in a dtype of 16 bits.
        values: [T, K] e4m3, where a GPU multiplies it, else bytes of it.
        scales: [T] f32; NaN of a row that holds NaN or infinity.
    """

    rows: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor


ProductRows = torch.Tensor | Fp8Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOperand:
    """Rows as a product reads them.

    Args:
        values: [T, K], in their dtype; or see Fp8Rows.
        scales: [T] f32; anything unread if there are none.
        has_scales: They are in FP8.
        dot: What kernels multiply.
    """

    values: torch.Tensor
    scales: torch.Tensor
    has_scales: bool
    dot: tl.dtype

    @property
    def multiplies_e4m3(self) -> bool:
        """Return whether e4m3 is multiplied as it is."""
        return self.values.dtype == torch.float8_e4m3fn


def rows_of(x: ProductRows) -> torch.Tensor:
    """Return rows in their dtype. [T, K]."""
    return x if isinstance(x, torch.Tensor) else x.rows


def becomes_fp8(x: torch.Tensor, weight: object) -> bool:
    """Return whether rows become FP8 before they are multiplied by a weight, or by weights."""
    if not isinstance(weight, QuantizedWeight | QuantizedExperts):
        return False
    return weight.has_fp8_rows and x.element_size() == 2


def wants_fp8_rows(weight: object) -> bool:
    """Return whether the rows that a weight, or weights, are made for are to be Fp8Rows."""
    if not isinstance(weight, QuantizedWeight | QuantizedExperts):
        return False
    return weight.has_fp8_rows and weight.dtype.itemsize == 2 and use_triton(weight.values)


def row_operand(x: ProductRows, weight: object) -> RowOperand:
    """Return rows as the kernels of a product with a weight read them.

    Args:
        x: [T, K].
    """
    rows = rows_of(x)
    if not becomes_fp8(rows, weight):
        return RowOperand(values=rows, scales=rows, has_scales=False, dot=dot_dtype(rows))
    fp8 = quantize_rows(x) if isinstance(x, torch.Tensor) else x
    if fp8.values.dtype == torch.float8_e4m3fn:
        dot = tl.float8e4nv
    else:
        dot = tl.bfloat16 if rows.is_cuda else dot_dtype(rows)
    return RowOperand(values=fp8.values, scales=fp8.scales, has_scales=True, dot=dot)


def empty_fp8(rows: torch.Tensor) -> Fp8Rows:
    """Return rows beside memory for their FP8, which a kernel is to fill.

    Args:
        rows: [T, K], dense.
    """
    assert rows.dim() == 2 and rows.element_size() == 2
    dtype = torch.float8_e4m3fn if multiplies_fp8(rows.device) else torch.uint8
    return Fp8Rows(
        rows=rows,
        values=torch.empty(rows.shape, dtype=dtype, device=rows.device),
        scales=torch.empty(len(rows), dtype=torch.float32, device=rows.device),
    )


@triton.jit
def largest_of(x):
    """Return the largest magnitude of a row; infinity, if it holds what is no number; device
    function.

    Args:
        x: Block of f32.
    """
    # Magnitudes are ordered as their bits are, what is no number after infinity.
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    return tl.minimum(bits, _INFINITY_BITS).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(largest):
    """Return the scale of a row, and what its values are multiplied by; device function.

    Args:
        largest: See `largest_of`.
    """
    # That a value is no number the scale says: not all bytes could.
    largest = tl.where(largest > _LEAST, largest, _MAX)
    most = tl.full((), _MAX, tl.float32)
    scale = tl.where(largest < float("inf"), tl.div_rn(largest, most), float("nan"))
    return scale, tl.div_rn(most, largest)


@triton.jit
def store_fp8(x, factor, values_ptr, column, width):
    """Store values of a row in FP8; device function.

    Args:
        x: Block of f32, rounded to the dtype of the rows.
        factor: See `scale_of`.
        values_ptr: [width] e4m3, or u8 for bytes of it; mutated.
        column: Block of i32.
    """
    scaled = tl.where(tl.abs(x) < float("inf"), x, 0.0) * factor
    if values_ptr.dtype.element_ty == tl.float8e4nv:
        values = scaled.to(tl.float8e4nv)
    else:
        values = to_e4m3(scaled)
    # As many values a thread as of 16 bits: with more of them, sums of the same kernel would be
    # added in another order than without FP8.
    places = tl.max_contiguous(values_ptr + column, _THREAD_VALUES)
    tl.store(places, values, mask=column < width)


@triton.jit
def store_fp8_row(x, values_ptr, scales_ptr, row, column, width):
    """Store a whole row in FP8; device function.

    Args:
        x: Block of f32, rounded to the dtype of the rows.
        values_ptr: [T, width] e4m3 or u8 mutated.
        scales_ptr: [T] f32 mutated.
        row: i64.
        column: Block of i32.
    """
    scale, factor = scale_of(largest_of(x))
    store_fp8(x, factor, values_ptr + row * width, column, width)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _quantize_rows_kernel(
    x_ptr,  # [T, K]
    values_ptr,  # [T, K] e4m3 or u8 mutated
    scales_ptr,  # [T] f32 mutated
    x_stride,
    width_k,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Quantise a row. Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    wait_for_previous(IS_DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < width_k, other=0.0).to(tl.float32)
    store_fp8_row(x, values_ptr, scales_ptr, row, k, width_k)


def quantize_rows(x: torch.Tensor) -> Fp8Rows:
    """Return rows with their FP8.

    Args:
        x: [T, K], of 16 bits.
    """
    num_rows, width_k = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    out = empty_fp8(x)
    if num_rows:
        block = triton.next_power_of_2(width_k)
        count_launch("quantize_rows")
        _quantize_rows_kernel[(num_rows,)](
            x,
            out.values,
            out.scales,
            x.stride(0),
            width_k,
            BLOCK=block,
            num_warps=min(32, max(4, block // (256 if num_rows <= _FEW_ROWS else 1024))),
            **dependent_launch(x),
        )
    return out


def quantize_rows_ref(x: torch.Tensor) -> Fp8Rows:
    """Do what `quantize_rows` does in plain torch; values are bytes."""
    rows = x.float()
    largest = torch.where(rows.isfinite(), rows.abs(), torch.inf).amax(dim=1)
    most = torch.full_like(largest, E4M3_MAX)
    largest = torch.where(largest > _LEAST.value, largest, most)
    scales = torch.where(largest < torch.inf, largest / most, torch.nan)
    factors = most / largest
    scaled = (rows.where(rows.isfinite(), 0.0) * factors[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return Fp8Rows(rows=x, values=scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales=scales)
