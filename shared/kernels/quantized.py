"""Weights in FP8 (e4m3) with scales in float32, and how kernels read them; int4 is in int4.py.

A kernel multiplies rows by the values themselves, which every activation dtype holds exactly, and
scales what it has accumulated: at the end of a split of K, if an output has one scale, else after
every SCALE_BLOCK values of k. Rows may be in FP8 as well, with a scale each (fp8_rows.py).
Values that are not multiplied as they are, are loaded as bytes and converted by moving bits, since
neither Triton's interpreter nor all GPUs know e4m3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from shared.kernels.int4 import Int4Weight, add_groups, load_parts, load_scales, stack_int4

E4M3_MAX = 448.0
# Values of k that share a scale, where an output has more than one.
SCALE_BLOCK = 128
_BLOCK = tl.constexpr(SCALE_BLOCK)
# Rows of a weight that are quantised, or dequantised, at a time.
_QUANTIZED_ROWS = 1 << 13
# Values that are checked at a time: few launches for small weights, little memory for large ones.
_CHECKED_VALUES = 64 << 20
# The lowest bit of each of eight bytes.
_LOWEST_BITS = 0x0101010101010101
# e4m3 has 4 bits of exponent, with a bias of 7; moved to where bfloat16 and float32 have theirs, a
# value lacks this factor. It is exact, of subnormal values too.
_REBIAS = tl.constexpr(2.0**120)
# The two bytes in the halves of a register, moved to sign, exponent and mantissa, and rebiased.
_TO_BF16_PAIR = tl.constexpr(
    """
    {
    .reg .b32 w, m, rebias, minus_zero;
    cvt.u32.u16 w, $1;
    prmt.b32 w, w, 0, 0x1404;
    shr.u32 m, w, 4;
    and.b32 m, m, 0x07F007F0;
    lop3.b32 w, w, 0x80008000, m, 0xEA;
    mov.b32 rebias, 0x7B807B80;
    mov.b32 minus_zero, 0x80008000;
    fma.rn.bf16x2 $0, w, rebias, minus_zero;
    }
    """
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """The weight of a linear layer in FP8: values times scales.

    Args:
        values: [N, K] float8_e4m3fn, no NaN.
        scales: [1, N] f32, one per output; or [ceil(K / SCALE_BLOCK), N] f32.
        dtype: Dtype of the rows that are multiplied by the weight.
        has_fp8_rows: Rows of 16 bits become FP8 before the product, where a kernel computes it.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype
    has_fp8_rows: bool = False

    @property
    def shape(self) -> torch.Size:
        """Return (N, K)."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Return where the values are."""
        return self.values.device

    @property
    def scaling(self) -> str:
        """Return what shares a scale: "channel", an output, or "block"."""
        return "channel" if len(self.scales) == 1 else "block"

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return values times scales, rounded to a dtype. [N, K]."""
        dense = torch.empty(self.shape, dtype=dtype, device=self.device)
        # In parts, as `quantize`.
        for begin in range(0, len(dense), _QUANTIZED_ROWS):
            part = slice(begin, begin + _QUANTIZED_ROWS)
            scales = self.scales[:, part]
            if len(scales) > 1:
                scales = scales.repeat_interleave(SCALE_BLOCK, dim=0)[: self.shape[1]]
            dense[part] = self.values[part].float() * scales.T
        return dense

    def is_finite(self) -> torch.Tensor:
        """Return whether no value is NaN (e4m3 has no infinity), and all scales are numbers.

        Returns: [] bool on the device, which nobody has waited for yet.
        """
        is_number = are_numbers(self.values.view(torch.uint8).reshape(1, -1))
        return self.scales.isfinite().all() & is_number[0]

    def rearranged(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedWeight:
        """Return the weight with other rows, or in another order.

        Args:
            change: Does it with rows [N, any], by their places alone.
        """
        values = change(self.values.view(torch.uint8)).contiguous()
        return replace(
            self,
            values=values.view(torch.float8_e4m3fn),
            scales=change(self.scales.T).T.contiguous(),
        )


def are_numbers(bits: torch.Tensor) -> torch.Tensor:
    """Return which rows of e4m3 hold no NaN; it has no infinity.

    Args:
        bits: [E, n] u8.
    Returns: [E] bool on the device, which nobody has waited for yet.
    """
    is_wide = bits.shape[1] % 8 == 0 and bits.storage_offset() % 8 == 0
    words = bits.contiguous().view(torch.int64 if is_wide else torch.int8)
    width = min(words.shape[1], _CHECKED_VALUES // words.itemsize)
    num_rows = _CHECKED_VALUES // words.itemsize // width
    rows = [
        torch.stack([_hold_nan(part) for part in some.split(width, dim=1)]).any(dim=0)
        for some in words.split(num_rows)
    ]
    return ~torch.cat(rows)


def _hold_nan(words: torch.Tensor) -> torch.Tensor:
    """Return which rows hold a byte that is NaN in e4m3: one whose last seven bits are ones.

    Args:
        words: [E, n] i64, or i8, of the bytes. Eight at once, a GPU is as fast as its memory.
    Returns: [E] bool.
    """
    ones = _LOWEST_BITS if words.itemsize == 8 else 1
    last_bits = 0x7F * ones
    # One more carries into the first bit of the byte, and none goes into the next byte.
    return (words & last_bits).add_(ones).bitwise_and_(~last_bits).any(dim=1)


GpuWeight = torch.Tensor | QuantizedWeight | Int4Weight


def quantize(weight: torch.Tensor, *, has_fp8_rows: bool = False) -> QuantizedWeight:
    """Return a weight in FP8, with the scale of each output such that its largest value fits.

    Args:
        weight: [N, K], finite.
        has_fp8_rows: See QuantizedWeight.
    """
    values = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    # In parts: that of a vocabulary would take six times its memory.
    for begin in range(0, len(weight), _QUANTIZED_ROWS):
        part = slice(begin, begin + _QUANTIZED_ROWS)
        rows = weight[part].float()
        # By a tensor: by a number, a GPU would multiply by what is nearly its inverse.
        largest = rows.abs().amax(dim=1)
        scale = largest / torch.full_like(largest, E4M3_MAX)
        scales[part] = scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        scaled = (rows / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
        values[part] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return QuantizedWeight(
        values=values.view(torch.float8_e4m3fn),
        scales=scales[None],
        dtype=weight.dtype,
        has_fp8_rows=has_fp8_rows,
    )


def spread_scales(scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """Return scales as QuantizedWeights have them; None: they are not those of such weights.

    Args:
        scales: [E, ...], of each weight of a checkpoint: one; one per row; or one per block of
            SCALE_BLOCK x SCALE_BLOCK.
        shape: (N, K) of each weight.
    Returns: [E, 1, N], or [E, ceil(K / SCALE_BLOCK), N].
    """
    width_n, width_k = shape
    count, *of_one = scales.shape
    if math.prod(of_one) == 1:
        return scales.reshape(count, 1, 1).repeat(1, 1, width_n)
    if of_one in ([width_n], [width_n, 1]):
        return scales.reshape(count, 1, width_n)
    if of_one != [-(-width_n // SCALE_BLOCK), -(-width_k // SCALE_BLOCK)]:
        return None
    by_output = scales.transpose(1, 2).repeat_interleave(SCALE_BLOCK, dim=2)
    return by_output[..., :width_n].contiguous()


def stack_rows(parts: Sequence[GpuWeight]) -> GpuWeight | None:
    """Return weights of one input above each other; None: they are not in one form."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    int4 = [part for part in parts if isinstance(part, Int4Weight)]
    if len(int4) == len(parts):
        return stack_int4(int4)
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    return _stack_fp8(quantized) if len(quantized) == len(parts) else None


def _stack_fp8(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    if len({(len(part.scales), part.has_fp8_rows) for part in parts}) > 1:
        return None
    values = torch.cat([part.values.view(torch.uint8) for part in parts])
    return replace(
        parts[0],
        values=values.view(torch.float8_e4m3fn),
        scales=torch.cat([part.scales for part in parts], dim=1),
    )


def values_of(weight: GpuWeight) -> torch.Tensor:
    """Return the tensor that holds the values of a weight, of N rows."""
    return weight if isinstance(weight, torch.Tensor) else weight.values


class ScaledValues(Protocol):
    """Values in FP8, of one matrix or several, and scales as QuantizedWeight has them."""

    @property
    def values(self) -> torch.Tensor: ...
    @property
    def scales(self) -> torch.Tensor: ...
    @property
    def scaling(self) -> str: ...


def fp8_operands(
    weight: ScaledValues, *, multiplies_e4m3: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return what a kernel reads of values in FP8: values, scales, and constants.

    Args:
        multiplies_e4m3: It multiplies e4m3; else it reads bytes.
    """
    values = weight.values if multiplies_e4m3 else weight.values.view(torch.uint8)
    return values, weight.scales.contiguous(), {"SCALING": weight.scaling}


def operands(
    weight: GpuWeight, *, multiplies_e4m3: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return what a kernel reads: values, scales (unread if there are none), and constants.

    Args:
        multiplies_e4m3: See `fp8_operands`.
    """
    if isinstance(weight, Int4Weight):
        constants = {"SCALING": weight.scaling, "GROUP": weight.group_size}
        if not weight.values.is_cuda:  # what interprets kernels knows no other way to make operands
            constants["DOT_DTYPE"] = tl.float32
        return weight.values, weight.scales, constants
    if isinstance(weight, QuantizedWeight):
        values, scales, constants = fp8_operands(weight, multiplies_e4m3=multiplies_e4m3)
        return values, scales, {**constants, "GROUP": 0}
    return weight, weight, {"SCALING": "none", "GROUP": 0}


@triton.jit
def from_e4m3(values, DOT_DTYPE: tl.constexpr):
    """Return FP8 values as operands of a product; device function.

    Args:
        values: Block of u8, or of e4m3 if that is DOT_DTYPE.
    """
    if values.dtype == DOT_DTYPE:  # multiplied as it is: bytes would go through registers first
        converted = values
    elif DOT_DTYPE == tl.bfloat16:
        converted = tl.inline_asm_elementwise(
            _TO_BF16_PAIR, "=r,h", [values], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        bits = values.to(tl.uint32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        converted = (bits.to(tl.float32, bitcast=True) * _REBIAS).to(DOT_DTYPE)
    return converted


@triton.jit
def load_weight(weight_desc, first_n, k, DOT_DTYPE: tl.constexpr, SCALING: tl.constexpr):
    """Return a block of a weight as operand of a product; device function."""
    weight = weight_desc.load([first_n, k])
    if SCALING == "none":
        weight = weight.to(DOT_DTYPE)
    else:
        weight = from_e4m3(weight, DOT_DTYPE)
    return weight


@triton.jit
def load_rows(x_desc, first_t, k, DOT_DTYPE: tl.constexpr, HAS_FP8_ROWS: tl.constexpr):
    """Return a block of rows as operand of a product; device function."""
    x = x_desc.load([first_t, k])
    if HAS_FP8_ROWS:
        x = from_e4m3(x, DOT_DTYPE)
    else:
        x = x.to(DOT_DTYPE)
    return x


@triton.jit
def load_block_scales(scales_ptr, n, k, width_n, width_k):
    """Return the scales of a block of K in a weight, [BLOCK_N] f32; of the last one past it.

    Args:
        scales_ptr: [ceil(K / SCALE_BLOCK), N].
    """
    block = tl.minimum(k // _BLOCK, tl.cdiv(width_k, _BLOCK) - 1)
    return tl.load(scales_ptr + block * width_n + n, mask=n < width_n, other=0.0)


@triton.jit
def add_product(
    acc,  # [BLOCK_N, BLOCK_T] f32
    weight,  # [BLOCK_N, BLOCK_K]
    x,  # [BLOCK_T, BLOCK_K]
    by_output,  # [BLOCK_N] f32, unread unless SCALING is "block"
    SCALING: tl.constexpr,
):
    """Return the sum with a product added to it, scaled if its block has scales of its own."""
    if SCALING == "block":
        acc += tl.dot(weight, x.T, input_precision="ieee") * by_output[:, None]
    else:
        acc = tl.dot(weight, x.T, acc, input_precision="ieee")
    return acc


@triton.jit
def add_blocks(
    acc,  # [BLOCK_N, BLOCK_T] f32
    x_desc,  # [T, K] in blocks [BLOCK_T, BLOCK_K], of int4 [BLOCK_T, GROUP]
    weight_desc,  # [N, K] in blocks [BLOCK_N, BLOCK_K]; words of int4 in [BLOCK_N, GROUP]
    scales_ptr,  # see `load_block_scales` and `load_scales`
    first_t,
    first_n,
    begin,
    end,
    width_n,
    width_k,
    DOT_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_FP8_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the sum with the products of K in [begin, end) added to it, begin < end; device
    function.
    """
    n = first_n + tl.arange(0, BLOCK_N)
    # Scales are loaded a block ahead: no product waits for memory.
    by_output = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if SCALING == "block":
        by_output = load_block_scales(scales_ptr, n, begin, width_n, width_k)
    for k in range(begin, end, BLOCK_K):
        if GROUP:
            scales = load_scales(scales_ptr, 0, n, k, width_n, width_k, SCALING, GROUP)
            zeros = scales
            if SCALING == "zeros":
                zeros = load_scales(scales_ptr, 1, n, k, width_n, width_k, SCALING, GROUP)
            words = weight_desc.load([first_n, k // 4])
            x = load_parts(x_desc, first_t, k, DOT_DTYPE, GROUP)
            acc = add_groups(acc, words, x, scales, zeros, DOT_DTYPE, SCALING)
        else:
            if SCALING == "block":
                next_output = load_block_scales(scales_ptr, n, k + BLOCK_K, width_n, width_k)
            weight = load_weight(weight_desc, first_n, k, DOT_DTYPE, SCALING)
            x = load_rows(x_desc, first_t, k, DOT_DTYPE, HAS_FP8_ROWS)
            acc = add_product(acc, weight, x, by_output, SCALING)
            if SCALING == "block":
                by_output = next_output
    return acc


@triton.jit
def scale_sum(acc, scales_ptr, n, width_n, SCALING: tl.constexpr):
    """Return the sum of a split, scaled if all its values share the scale; device function."""
    if SCALING == "channel":
        acc = acc * tl.load(scales_ptr + n, mask=n < width_n, other=0.0)[:, None]
    return acc


@triton.jit
def scale_rows(acc, row_scales_ptr, row, in_rows, HAS_FP8_ROWS: tl.constexpr):
    """Return the sum of a split, scaled if rows are in FP8; device function.

    Args:
        row_scales_ptr: [T].
        row: [BLOCK_T].
    """
    if HAS_FP8_ROWS:
        acc = acc * tl.load(row_scales_ptr + row, mask=in_rows, other=0.0)[None, :]
    return acc
