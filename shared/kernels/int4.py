"""Weights in int4: values 0..15 less a zero, times the scale of their group, and how kernels read
them.

A block of K has four groups, and value i of a word of 16 bits lies in group i: so words are loaded
as if they were values in bfloat16, and yield the operands of four products. Values become operands
without a conversion: as the last bits of a number's mantissa, of which that number and the zero are
subtracted, exactly. The product of a group is scaled in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch.nn import functional

NUM_PARTS = 4  # of a block: its groups
# The zero of weights that have no other.
MIDDLE = 8
# What splits of K are multiples of: the longest block.
SPLIT_MULTIPLE = NUM_PARTS * 128
# Of the outputs of a projection: AWQ and GPTQ keep as many zeros in a word.
WIDTH_MULTIPLE = 8
_NUM_PARTS, _MIDDLE = tl.constexpr(NUM_PARTS), tl.constexpr(MIDDLE)
# In whose last bits values are read.
_NUMBER_OF_BFLOAT16, _NUMBER_OF_FLOAT16 = tl.constexpr(128.0), tl.constexpr(1024.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """The weight of a linear layer in int4.

    Args:
        values: [N, blocks * group_size] i16; word w of block b has in its bits 4 i .. 4 i + 3 the
            value of k = (4 b + i) * group_size + w, and MIDDLE past the last k.
        scales: [4 * blocks, 1 or 2, N] floating-point: scales and, if there are two, zeros (0..16).
        group_size: Values of k that share a scale: 32, 64 or 128.
        width_k: K.
        dtype: Of the rows that are multiplied by it.
    """

    values: torch.Tensor
    scales: torch.Tensor
    group_size: int
    width_k: int
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Return (N, K)."""
        return torch.Size((len(self.values), self.width_k))

    @property
    def device(self) -> torch.device:
        """Return where the values are."""
        return self.values.device

    @property
    def block_k(self) -> int:
        """Return how many values of k a block has."""
        return NUM_PARTS * self.group_size

    @property
    def scaling(self) -> str:
        """Return "group", or "zeros" if groups have zeros of their own."""
        return "group" if self.scales.shape[1] == 1 else "zeros"

    def dequantized(self) -> torch.Tensor:
        """Return values less zeros, times scales. [N, K] f32."""
        words = self.values.unflatten(1, (-1, 1, self.group_size))
        shifts = torch.arange(0, 4 * NUM_PARTS, 4, dtype=torch.int16, device=self.device)
        values = ((words >> shifts[:, None]) & 15).flatten(1)[:, : self.width_k]
        spread = self.scales.float().repeat_interleave(self.group_size, dim=0)
        spread = spread[: self.width_k]
        zeros = spread[:, 1].T if spread.shape[1] == 2 else float(MIDDLE)
        return (values.float() - zeros) * spread[:, 0].T

    def is_finite(self) -> bool:
        """Return whether all scales are numbers."""
        return bool(self.scales.isfinite().all())

    def rearranged(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Int4Weight:
        """Return the weight with other rows, or in another order.

        Args:
            change: Does it with rows [N, any], by their places alone.
        """
        rows = self.scales.flatten(0, 1).T
        scales = change(rows).T.contiguous().view_as(self.scales)
        return replace(self, values=change(self.values).contiguous(), scales=scales)

    def with_zeros(self) -> Int4Weight:
        """Return the weight with a zero for each group, if it has none."""
        if self.scales.shape[1] == 2:
            return self
        zeros = torch.full_like(self.scales, float(MIDDLE))
        return replace(self, scales=torch.cat([self.scales, zeros], dim=1))


def pack_int4(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> Int4Weight:
    """Return values and scales as kernels read them.

    Args:
        values: [N, K] u8, 0..15.
        scales: [N, ceil(K / group_size)], floating-point.
        zeros: Of the shape of `scales`, 0..16; None: all are MIDDLE.
        group_size: 32, 64 or 128.
        dtype: Of the rows that are multiplied by it.
    """
    assert group_size in (32, 64, 128)
    width_k = values.shape[1]
    blocks = functional.pad(values, (0, -width_k % (NUM_PARTS * group_size)), value=MIDDLE)
    parts = blocks.unflatten(1, (-1, NUM_PARTS, group_size))
    words = parts[:, :, 0].to(torch.int16)
    for i in range(1, NUM_PARTS):
        words |= parts[:, :, i].to(torch.int16) << (4 * i)
    if zeros is not None and bool((zeros == MIDDLE).all()):
        zeros = None
    kinds = [scales] if zeros is None else [scales, zeros.to(scales.dtype)]
    of_groups = torch.stack(kinds).permute(2, 0, 1)
    num_groups = blocks.shape[1] // group_size
    of_groups = functional.pad(of_groups, (0, 0, 0, 0, 0, num_groups - len(of_groups)))
    return Int4Weight(
        values=words.flatten(1),
        scales=of_groups.contiguous(),
        group_size=group_size,
        width_k=width_k,
        dtype=dtype,
    )


def stack_int4(parts: Sequence[Int4Weight]) -> Int4Weight | None:
    """Return weights of one input above each other; None: their groups differ."""
    first = parts[0]
    if len({(part.group_size, part.width_k) for part in parts}) > 1:
        return None
    if any(part.scaling == "zeros" for part in parts):
        parts = [part.with_zeros() for part in parts]
    dtypes = {part.scales.dtype for part in parts}
    dtype = first.scales.dtype if len(dtypes) == 1 else torch.float32
    return replace(
        first,
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales.to(dtype) for part in parts], dim=2),
    )


@triton.constexpr_function
def _to_pair(part, kind, number, one):
    """Return how values of part 0..3 of both words of a register become operands: as the last bits
    of a number in their dtype. It and the zero are subtracted by adding to it times one, the only
    sum of pairs that all GPUs have.
    """
    return f"""
    {{
    .reg .b32 w, one;
    shr.b32 w, $1, {4 * part};
    lop3.b32 w, w, 0x000F000F, {number}{number[2:]}, 0xEA;
    mov.b32 one, {one}{one[2:]};
    fma.rn.{kind} $0, w, one, $2;
    }}
    """


@triton.jit
def from_int4(words, minus_zero, PART: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """Return the values of part 0..3 of words, less their zeros, as operands; device function.

    Args:
        words: [BLOCK_N, group_size] i16.
        minus_zero: [BLOCK_N, 1] in DOT_DTYPE, less the number in whose last bits values are read.
    """
    if DOT_DTYPE == tl.float32:
        values = ((words >> (4 * PART)) & 15).to(tl.float32) + minus_zero
    elif DOT_DTYPE == tl.bfloat16:
        values = tl.inline_asm_elementwise(
            _to_pair(PART, "bf16x2", "0x4300", "0x3F80"),
            "=r,r,r",
            [words, minus_zero],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        values = tl.inline_asm_elementwise(
            _to_pair(PART, "f16x2", "0x6400", "0x3C00"),
            "=r,r,r",
            [words, minus_zero],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return values


@triton.jit
def load_scales(
    scales_ptr,  # [groups, 1 or 2, N]
    row,
    n,
    k,
    width_n,
    width_k,
    SCALING: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the scales of the four groups of a block, or their zeros; device function.

    Args:
        row: 0 of scales, 1 of zeros.
    Returns: Tuple of [BLOCK_N] f32.
    """
    NUM_ROWS: tl.constexpr = 2 if SCALING == "zeros" else 1
    mask = (n < width_n) & (k < width_k)
    first = scales_ptr + (k // GROUP * NUM_ROWS + row) * width_n + n
    step = NUM_ROWS * width_n
    return (
        tl.load(first, mask=mask, other=0.0).to(tl.float32),
        tl.load(first + step, mask=mask, other=0.0).to(tl.float32),
        tl.load(first + 2 * step, mask=mask, other=0.0).to(tl.float32),
        tl.load(first + 3 * step, mask=mask, other=0.0).to(tl.float32),
    )


@triton.jit
def add_groups(
    acc,  # [BLOCK_N, BLOCK_T] f32
    words,  # [BLOCK_N, group_size] i16
    x,  # of the groups, [BLOCK_T, group_size] each
    scales,  # of the groups, see `load_scales`
    zeros,  # likewise, or any tuple if they have none
    DOT_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
):
    """Return the sum with the product of a block added to it, group by group; device function."""
    number: tl.constexpr = _NUMBER_OF_FLOAT16 if DOT_DTYPE == tl.float16 else _NUMBER_OF_BFLOAT16
    for part in tl.static_range(_NUM_PARTS):
        if SCALING == "zeros":
            zero = zeros[part][:, None]
        else:
            zero = tl.full((words.shape[0], 1), _MIDDLE, dtype=tl.float32)
        minus_zero = (-zero if DOT_DTYPE == tl.float32 else -number - zero).to(DOT_DTYPE)
        weight = from_int4(words, minus_zero, part, DOT_DTYPE)
        product = tl.dot(weight, x[part].T, input_precision="ieee")
        acc += product * scales[part][:, None]
    return acc


@triton.jit
def load_parts(x_desc, first_t, k, DOT_DTYPE: tl.constexpr, GROUP: tl.constexpr):
    """Return what rows have for the four groups of a block, as operands; device function."""
    return (
        x_desc.load([first_t, k]).to(DOT_DTYPE),
        x_desc.load([first_t, k + GROUP]).to(DOT_DTYPE),
        x_desc.load([first_t, k + 2 * GROUP]).to(DOT_DTYPE),
        x_desc.load([first_t, k + 3 * GROUP]).to(DOT_DTYPE),
    )
