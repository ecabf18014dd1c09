"""Rows in FP8 (e4m3): what is multiplied by weights in FP8 whose rows are to be so as well.

A row is divided by its largest magnitude / 448, which is its scale: its bytes and its scale are a
function of that row alone. (One scale for a row, where DeepSeek-V3 has one for 128 values of it:
e4m3 has an exponent of its own, so that values down to 1 / 28672 of the largest one keep all of
their bits.) A kernel multiplies e4m3 by e4m3 and scales rows at the end of each split of K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, dot_dtype
from shared.kernels.fp8_cache import to_e4m3
from shared.kernels.fp8_experts import QuantizedExperts
from shared.kernels.quantized import E4M3_MAX, QuantizedWeight

_MAX = tl.constexpr(E4M3_MAX)
# Rows of nothing larger become zeros: the inverse of their scale might be no number.
_LEAST = tl.constexpr(2.0**-100)
# The first GPUs that multiply e4m3, by compute capability.
_MULTIPLIES_FP8 = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOperand:
    """Rows as a product reads them.

    Args:
        values: [T, K], in their dtype; or e4m3, where a GPU multiplies it, else bytes of it.
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


def becomes_fp8(x: torch.Tensor, weight: object) -> bool:
    """Return whether rows become FP8 before they are multiplied by a weight, or by weights."""
    if not isinstance(weight, QuantizedWeight | QuantizedExperts):
        return False
    return weight.has_fp8_rows and x.element_size() == 2


def row_operand(x: torch.Tensor, weight: object) -> RowOperand:
    """Return rows as the kernels of a product with a weight read them.

    Args:
        x: [T, K].
    """
    if not becomes_fp8(x, weight):
        return RowOperand(values=x, scales=x, has_scales=False, dot=dot_dtype(x))
    values, scales = quantize_rows(x)
    if x.is_cuda and torch.cuda.get_device_capability(x.device) >= _MULTIPLIES_FP8:
        values, dot = values.view(torch.float8_e4m3fn), tl.float8e4nv
    else:
        dot = tl.bfloat16 if x.is_cuda else dot_dtype(x)
    return RowOperand(values=values, scales=scales, has_scales=True, dot=dot)


@triton.jit(do_not_specialize=["x_stride"])
def _quantize_rows_kernel(
    x_ptr,  # [T, K]
    values_ptr,  # [T, K] u8 mutated
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
    size = tl.abs(x)
    largest = tl.max(tl.where(size < float("inf"), size, float("inf")), axis=0)
    # That a value is no number the scale says: not all bytes could.
    largest = tl.where(largest > _LEAST, largest, _MAX)
    most = tl.full((), _MAX, tl.float32)
    scale = tl.where(largest < float("inf"), tl.div_rn(largest, most), float("nan"))
    factor = tl.div_rn(most, largest)
    scaled = tl.where(size < float("inf"), x, 0.0) * factor
    tl.store(values_ptr + row * width_k + k, to_e4m3(scaled), mask=k < width_k)
    tl.store(scales_ptr + row, scale)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in FP8.

    Args:
        x: [T, K]; a row that holds NaN or infinity gets a scale of NaN.
    Returns: Bytes of e4m3 [T, K] u8, and scales [T] f32.
    """
    num_rows, width_k = x.shape
    values = torch.empty((num_rows, width_k), dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if x.stride(1) != 1:
        x = x.contiguous()
    if num_rows:
        block = triton.next_power_of_2(width_k)
        count_launch("quantize_rows")
        _quantize_rows_kernel[(num_rows,)](
            x,
            values,
            scales,
            x.stride(0),
            width_k,
            BLOCK=block,
            num_warps=min(16, max(4, block // 1024)),
            **dependent_launch(x),
        )
    return values, scales


def quantize_rows_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `quantize_rows` does in plain torch."""
    rows = x.float()
    largest = torch.where(rows.isfinite(), rows.abs(), torch.inf).amax(dim=1)
    most = torch.full_like(largest, E4M3_MAX)
    largest = torch.where(largest > _LEAST.value, largest, most)
    scales = torch.where(largest < torch.inf, largest / most, torch.nan)
    factors = most / largest
    scaled = (rows.where(rows.isfinite(), 0.0) * factors[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales
