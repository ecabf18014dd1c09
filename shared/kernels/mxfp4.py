"""Weights in MXFP4, and how kernels read them: values of 4 bits (e2m1), of which 32 neighbours in k
share a scale, a power of two (e8m0).

What is multiplied by is values times scales in the dtype of the rows, which bfloat16 and float32
hold exactly: the bits of a product are those of a weight that was dequantised before. A word of 16
bits holds a value of each of the four *parts* of a block, so that a word becomes an operand of four
products by moving bits, and a part has one scale per output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

# Values of k that share a scale; those of a part.
MXFP4_BLOCK = 32
NUM_PARTS = 4
# Values of k in a block of words.
WORDS_K = NUM_PARTS * MXFP4_BLOCK
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of a scale of 1. Above the largest one, products of values and scales are no float32.
_NEUTRAL, _MAX_SCALE = 127, 252
# e2m1 has 2 bits of exponent, with a bias of 1; moved to where bfloat16 and float32 have theirs, a
# value lacks this factor. It is exact, of subnormal values too.
_REBIAS = tl.constexpr(2.0**126)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Weights:
    """One weight [N, K] of each expert in MXFP4.

    Args:
        values: [E, N, blocks * 32] i16; word w of block b has in its bits 4 i .. 4 i + 3 the value
            of k = 128 b + 32 i + w, and 0 past the last k.
        scales: [E, blocks, N] i32; byte i of block b is the scale of its part i.
        width_k: K.
        dtype: Of the rows that are multiplied by it.
    """

    values: torch.Tensor
    scales: torch.Tensor
    width_k: int
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Return (E, N, K)."""
        return torch.Size((*self.values.shape[:2], self.width_k))


def dequantize_mxfp4(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return values times scales.

    Args:
        values: [..., K / 2] u8, two values each, that of lower k in the low half.
        scales: [..., K / MXFP4_BLOCK] u8, exponents plus 127.
    Returns: [..., K] f32.
    Source: OCP Microscaling Formats (MX) 1.0.
    """
    magnitudes = torch.tensor(_MAGNITUDES, device=values.device)
    table = torch.cat([magnitudes, -magnitudes])
    powers = scales.view(torch.float8_e8m0fnu).float().repeat_interleave(MXFP4_BLOCK, dim=-1)
    return table[_halves(values).int()] * powers


def has_numbers(scales: torch.Tensor) -> bool:
    """Return whether all weights with these scales are finite."""
    return int(scales.max()) <= _MAX_SCALE


def pack_mxfp4(
    weights: Iterable[tuple[torch.Tensor, torch.Tensor]], num_experts: int, dtype: torch.dtype
) -> Mxfp4Weights:
    """Return weights as kernels read them.

    Args:
        weights: Values and scales of expert 0, 1, ..., see `dequantize_mxfp4`; [N, ...] each.
        dtype: Of the rows that are multiplied by them.
    """
    iterator: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(weights)
    held: Mxfp4Weights | None = None
    for expert, (values, scales) in enumerate(iterator):
        words, packed = _words(values), _packed_scales(scales)
        if held is None:
            held = Mxfp4Weights(
                values=words.new_empty((num_experts, *words.shape)),
                scales=packed.new_empty((num_experts, *packed.shape)),
                width_k=2 * values.shape[1],
                dtype=dtype,
            )
        held.values[expert], held.scales[expert] = words, packed
    assert held is not None
    return held


def _halves(values: torch.Tensor) -> torch.Tensor:
    """Return the values of 4 bits in bytes. [..., K] u8."""
    return torch.stack((values & 0xF, values >> 4), dim=-1).flatten(-2)


def _words(values: torch.Tensor) -> torch.Tensor:
    """Return the words of a weight, values [N, K / 2] u8. [N, blocks * 32] i16."""
    halves = _halves(values)
    halves = functional.pad(halves, (0, -halves.shape[1] % WORDS_K))
    parts = halves.unflatten(1, (-1, NUM_PARTS, MXFP4_BLOCK)).to(torch.int16)
    words = parts[:, :, 0].clone()
    for i in range(1, NUM_PARTS):
        words |= parts[:, :, i] << (4 * i)
    return words.flatten(1)


def _packed_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales of a weight, [N, K / 32] u8, by blocks. [blocks, N] i32."""
    whole = functional.pad(scales, (0, -scales.shape[1] % NUM_PARTS), value=_NEUTRAL)
    return whole.contiguous().view(torch.int32).T


@triton.constexpr_function
def _to_pair(part):
    """Return how both values of a register in a part become bfloat16, times a power of two."""
    to_magnitude = (
        f"shl.b32 m, $1, {6 - 4 * part};" if part < 2 else f"shr.b32 m, $1, {4 * part - 6};"
    )
    return f"""
    {{
    .reg .b32 w, m, rebias, minus_zero;
    {to_magnitude}
    and.b32 m, m, 0x01C001C0;
    shl.b32 w, $1, {12 - 4 * part};
    lop3.b32 w, w, 0x80008000, m, 0xEA;
    mov.b32 rebias, 0x7E807E80;
    mov.b32 minus_zero, 0x80008000;
    fma.rn.bf16x2 w, w, rebias, minus_zero;
    fma.rn.bf16x2 $0, w, $2, minus_zero;
    }}
    """


@triton.jit
def from_mxfp4(words, scales, PART: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """Return a part of a block as operand of a product; device function.

    Args:
        words: [BLOCK_N, 32] i16.
        scales: [BLOCK_N] i32, of the block.
    """
    scale = (scales >> (8 * PART)) & 0xFF
    if DOT_DTYPE == tl.bfloat16:
        # A scale of 2^-127 is subnormal.
        power = tl.where(scale == 0, 0x40, scale << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        code: tl.constexpr = _to_pair(PART)
        weight = tl.inline_asm_elementwise(
            code, "=r,r,r", [words, power[:, None]], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        power = tl.where(scale == 0, 0x400000, scale << 23).to(tl.float32, bitcast=True)
        bits = words.to(tl.int32) >> (4 * PART)
        bits = ((bits & 0x8) << 28) | ((bits & 0x7) << 22)
        weight = bits.to(tl.float32, bitcast=True) * _REBIAS * power[:, None]
        weight = weight.to(DOT_DTYPE)
    return weight
