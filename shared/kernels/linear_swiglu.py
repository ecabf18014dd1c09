"""The first half of a gated MLP: f(x Wg^T + bg) * (x Wu^T + bu), rows independent of each other.

One program computes the same outputs of both products, so that nothing but the result is stored.
The K schedule is that of `linear` with one split. Grid: (tiles of T, tiles of F), or of many rows
(programs,), to which tiles are dealt out evenly (`shared/kernels/balanced_tiles.py`). Only where
outputs are few and K is long, the products are those of `linear` in its splits, which another
kernel adds.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from shared.kernels.balanced_tiles import (
    Deal,
    deal_tiles,
    handover,
    num_multiprocessors,
    place_of,
    say_it_is_there,
    share_of,
    wait_for_it,
)
from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton
from shared.kernels.fp8_rows import ProductRows, becomes_fp8, row_operand, rows_of
from shared.kernels.int4 import Int4Weight, add_groups, load_parts, load_scales
from shared.kernels.linear import linear_addends, splits_of, sum_addends_block
from shared.kernels.linear_tiles import INTERPRETED_TILES, Tiles, num_tiles
from shared.kernels.linear_two_tiles import fits_two_tiles, linear_swiglu_two_tiles
from shared.kernels.products_cpu import CpuWeight, Weight, linear_cpu
from shared.kernels.quantized import (
    GpuWeight,
    QuantizedWeight,
    add_product,
    load_block_scales,
    load_rows,
    load_weight,
    operands,
)
from shared.kernels.swiglu import Activation, swiglu
from shared.kernels.swiglu_blocks import combine, store_swiglu
from shared.kernels.tensor_blocks import blocks_of

# Of more rows tiles are dealt out evenly: of fewer, what is handed over costs what that saves.
_MIN_BALANCED_ROWS = 384
# So few outputs of gate and up, those of shared experts, would leave half of a GPU empty with a
# program per tile of both.
_MAX_NARROW_N = 1 << 13


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


def choose_fp8_tiles(num_rows: int, element_size: int) -> Tiles:
    """Return a GPU's tiles of both products with a weight in FP8, no longer than SCALE_BLOCK."""
    if element_size == 4:
        return Tiles(64, 32, 32, 4, 2)
    if num_rows <= 16:
        return Tiles(64, 16, 128, 4, 6)
    if num_rows <= 32:
        return Tiles(64, 32, 128, 4, 5)
    return Tiles(64, 64, 128, 4, 3) if num_rows <= 64 else Tiles(64, 128, 128, 8, 3)


def choose_fp8_row_tiles(num_rows: int, *, by_block: bool) -> Tiles:
    """Return a GPU's tiles of both products of rows and a weight in FP8: few stages, so that four
    programs run at once, or of many rows two.

    Args:
        by_block: Blocks of K have scales of their own, and tiles are no longer.
    """
    if num_rows <= 16 and not by_block:
        return Tiles(64, 16, 256, 4, 3)
    block_t = next((size for size in (16, 32, 64) if num_rows <= size), 128)
    return Tiles(64, block_t, 128, 4, 3)


def choose_int4_tiles(num_rows: int, element_size: int, block_k: int) -> Tiles:
    """Return a GPU's tiles of both products with a weight in int4.

    Args:
        element_size: Bytes of a value of a row.
        block_k: Of the weight, see `Int4Weight`.
    """
    if element_size == 4:
        return Tiles(32, 16, block_k, 4, 2)
    num_stages = 2 if block_k > 256 else 3  # more would leave room for one program only
    if num_rows <= 16:
        return Tiles(64, 16, block_k, 4, num_stages)
    if num_rows <= 32:
        return Tiles(64, 32, block_k, 4, num_stages)
    return Tiles(64, 64, block_k, 8, num_stages)


def _choose_deal(counts: tuple[int, int], num_programs: int) -> Deal | None:
    """Return how tiles of T and N are dealt out; None: a program per tile takes fewer turns."""
    deal = deal_tiles(*counts, num_programs)
    num_turns = math.ceil(math.prod(counts) / num_programs)
    return deal if deal and counts[1] <= num_turns * deal.num_members else None


@triton.jit
def _add_products(
    x_desc,  # [T, K] in blocks [BLOCK_T, BLOCK_K]
    weight_desc,  # [2 F, K] in blocks [BLOCK_N, BLOCK_K], gate above up
    scales_ptr,  # see `add_blocks`, unread if SCALING is "none"
    gate,  # [BLOCK_N, BLOCK_T] f32
    up,
    first_t,
    first_n,
    width_f,
    width_k,
    begin,
    end,
    DOT_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_FP8_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return both sums with the products of K in [begin, end) added to them, begin < end."""
    n = first_n + tl.arange(0, BLOCK_N)
    width_n = 2 * width_f
    # Scales are loaded a block ahead, see `add_blocks`.
    by_gate = tl.zeros((BLOCK_N,), dtype=tl.float32)
    by_up = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if SCALING == "block":
        by_gate = load_block_scales(scales_ptr, n, begin, width_n, width_k)
        by_up = load_block_scales(scales_ptr, n + width_f, begin, width_n, width_k)
    for k in range(begin, end, BLOCK_K):
        if GROUP:
            scales = load_scales(scales_ptr, 0, n, k, width_n, width_k, SCALING, GROUP)
            up_scales = load_scales(scales_ptr, 0, n + width_f, k, width_n, width_k, SCALING, GROUP)
            zeros, up_zeros = scales, up_scales
            if SCALING == "zeros":
                zeros = load_scales(scales_ptr, 1, n, k, width_n, width_k, SCALING, GROUP)
                up_zeros = load_scales(
                    scales_ptr, 1, n + width_f, k, width_n, width_k, SCALING, GROUP
                )
            x = load_parts(x_desc, first_t, k, DOT_DTYPE, GROUP)
            words = weight_desc.load([first_n, k // 4])
            gate = add_groups(gate, words, x, scales, zeros, DOT_DTYPE, SCALING)
            words = weight_desc.load([first_n + width_f, k // 4])
            up = add_groups(up, words, x, up_scales, up_zeros, DOT_DTYPE, SCALING)
        else:
            if SCALING == "block":
                next_k = k + BLOCK_K
                next_gate = load_block_scales(scales_ptr, n, next_k, width_n, width_k)
                next_up = load_block_scales(scales_ptr, n + width_f, next_k, width_n, width_k)
            x = load_rows(x_desc, first_t, k, DOT_DTYPE, HAS_FP8_ROWS)
            gate_weight = load_weight(weight_desc, first_n, k, DOT_DTYPE, SCALING)
            up_weight = load_weight(weight_desc, first_n + width_f, k, DOT_DTYPE, SCALING)
            gate = add_product(gate, gate_weight, x, by_gate, SCALING)
            up = add_product(up, up_weight, x, by_up, SCALING)
            if SCALING == "block":
                by_gate = next_gate
                by_up = next_up
    return gate, up


@triton.jit(do_not_specialize=["num_rows"])
def _linear_swiglu_kernel(
    x_desc,
    weight_desc,
    scales_ptr,
    row_scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    width_f,
    width_k,
    DOT_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_FP8_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Compute one tile."""
    first_t = tl.program_id(0) * BLOCK_T
    first_n = tl.program_id(1) * BLOCK_N
    wait_for_previous(IS_DEPENDENT)
    gate = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    gate, up = _add_products(
        x_desc,
        weight_desc,
        scales_ptr,
        gate,
        up,
        first_t,
        first_n,
        width_f,
        width_k,
        0,
        width_k,
        DOT_DTYPE,
        SCALING,
        GROUP,
        HAS_FP8_ROWS,
        BLOCK_N,
        BLOCK_K,
    )
    store_swiglu(
        out_ptr,
        scales_ptr,
        row_scales_ptr,
        bias_ptr,
        gate,
        up,
        first_t,
        first_n,
        num_rows,
        width_f,
        SCALING,
        HAS_FP8_ROWS,
        HAS_BIAS,
        ACTIVATION,
        BLOCK_N,
        BLOCK_T,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _balanced_swiglu_kernel(
    x_desc,
    weight_desc,
    scales_ptr,
    bias_ptr,
    out_ptr,
    handover_ptr,  # [P, 4 + 2 * BLOCK_N * BLOCK_T] f32 mutated, see `handover`
    num_rows,
    width_f,
    width_k,
    NUM_GROUPS: tl.constexpr,
    NUM_MEMBERS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Compute a member's share of all tiles, the last one first; of rows that are not in FP8."""
    program = tl.program_id(0)
    first_t = (program % NUM_GROUPS) * BLOCK_T
    num_k = tl.cdiv(width_k, BLOCK_K)
    begin, end = share_of(program // NUM_GROUPS, NUM_MEMBERS, tl.cdiv(width_f, BLOCK_N) * num_k)
    NUM_VALUES: tl.constexpr = 2 * BLOCK_N * BLOCK_T
    value = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    first = begin // num_k
    last = (end - 1) // num_k
    wait_for_previous(IS_DEPENDENT)
    for i in range(0, last - first + 1):
        tile = last - i
        first_n = tile * BLOCK_N
        begin_k = tl.maximum(begin - tile * num_k, 0)
        end_k = tl.minimum(end - tile * num_k, num_k)
        tl.assume(begin_k < end_k)
        if begin_k > 0:
            word_ptr, values_ptr = place_of(handover_ptr, program - NUM_GROUPS, NUM_VALUES)
            wait_for_it(word_ptr)
            gate = tl.load(values_ptr + value)
            up = tl.load(values_ptr + BLOCK_N * BLOCK_T + value)
        else:
            gate = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
            up = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        gate, up = _add_products(
            x_desc,
            weight_desc,
            scales_ptr,
            gate,
            up,
            first_t,
            first_n,
            width_f,
            width_k,
            begin_k * BLOCK_K,
            end_k * BLOCK_K,
            DOT_DTYPE,
            SCALING,
            GROUP,
            HAS_FP8_ROWS=False,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
        )
        if end_k < num_k:
            word_ptr, values_ptr = place_of(handover_ptr, program, NUM_VALUES)
            tl.store(values_ptr + value, gate)
            tl.store(values_ptr + BLOCK_N * BLOCK_T + value, up)
            say_it_is_there(word_ptr)
        else:
            store_swiglu(
                out_ptr,
                scales_ptr,
                scales_ptr,
                bias_ptr,
                gate,
                up,
                first_t,
                first_n,
                num_rows,
                width_f,
                SCALING,
                HAS_FP8_ROWS=False,
                HAS_BIAS=HAS_BIAS,
                ACTIVATION=ACTIVATION,
                BLOCK_N=BLOCK_N,
                BLOCK_T=BLOCK_T,
            )


@triton.jit
def _swiglu_addends_kernel(
    addends_ptr,  # [S, T, 2 F] f32
    bias_ptr,  # [2 F], unread unless HAS_BIAS
    out_ptr,  # [T, F] mutated
    num_values,  # T * 2 F
    width_f,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Add the addends of gate and up, and combine them. Grid: (T, blocks of F)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_n = n < width_f
    wait_for_previous(IS_DEPENDENT)
    offset = row * 2 * width_f + n
    gate = sum_addends_block(addends_ptr, offset, num_values, in_n, NUM_SPLITS)
    up = sum_addends_block(addends_ptr, offset + width_f, num_values, in_n, NUM_SPLITS)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + width_f + n, mask=in_n, other=0.0).to(tl.float32)
    out = combine(gate, up, out_ptr.dtype.element_ty, ACTIVATION)
    tl.store(out_ptr + row * width_f + n, out, mask=in_n)


def _is_narrow(weight: GpuWeight) -> bool:
    """Return whether tiles of outputs are too few for a GPU, but splits of K would fill it; by the
    weight's shape alone, since it decides a row's bits.
    """
    return weight.shape[0] <= _MAX_NARROW_N and splits_of(weight) > 1


def _swiglu_of_addends(
    x: ProductRows,
    weight: GpuWeight,
    bias: torch.Tensor | None,
    activation: Activation,
    out: torch.Tensor,
) -> None:
    """Compute both products in splits of K. Mutates: `out`, all of it."""
    addends = linear_addends(x, weight)
    count_launch("swiglu_addends")
    block = 512
    _swiglu_addends_kernel[(len(out), triton.cdiv(out.shape[1], block))](
        addends,
        addends if bias is None else bias.contiguous(),
        out,
        addends.stride(0),
        out.shape[1],
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        NUM_SPLITS=len(addends),
        BLOCK=block,
        num_warps=4,
        **dependent_launch(addends),
    )


def linear_swiglu(
    x: ProductRows,
    weight: Weight,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> torch.Tensor:
    """Return f(gate) * up of two products; a row's bits do not depend on the other rows.

    Args:
        x: [T, K], see `linear`.
        weight: [2 F, K], the rows of gate above those of up; dtype of x; see `linear`.
        bias: [2 F] or None.
        activation: f, see `swiglu`.
    Returns: [T, F] in the dtype of x; gate and up are rounded to it before they are combined.
    """
    rows = rows_of(x)
    if isinstance(weight, CpuWeight) or not use_triton(rows):
        return linear_swiglu_cpu(rows, weight, bias, activation)
    assert rows.dtype == weight.dtype and rows.shape[1] == weight.shape[1]
    num_rows, width_f = len(rows), weight.shape[0] // 2
    out = torch.empty((num_rows, width_f), dtype=rows.dtype, device=rows.device)
    if num_rows == 0:
        return out
    if _is_narrow(weight):
        _swiglu_of_addends(x, weight, bias, activation, out)
        return out
    if rows.is_cuda and isinstance(weight, torch.Tensor) and fits_two_tiles(rows):
        linear_swiglu_two_tiles(rows, weight, bias, out, activation)
        return out
    tiles, deal = _choose(rows, weight)
    multiply_swiglu(x, weight, bias, out, tiles, deal, activation)
    return out


def _choose(rows: torch.Tensor, weight: GpuWeight) -> tuple[Tiles, Deal | None]:
    """Return the tiles of both products, and how they are dealt out; None: a program per tile."""
    num_rows, size = len(rows), rows.element_size()
    if not rows.is_cuda:
        return INTERPRETED_TILES, None
    if isinstance(weight, Int4Weight):
        return choose_int4_tiles(num_rows, size, weight.block_k), None
    if isinstance(weight, QuantizedWeight):
        # Never dealt out: in that kernel ptxas lets each product wait for the one before it.
        if becomes_fp8(rows, weight):
            return choose_fp8_row_tiles(num_rows, by_block=weight.scaling == "block"), None
        return choose_fp8_tiles(num_rows, size), None
    tiles = choose_tiles(num_rows, size)
    if size != 2 or num_rows <= _MIN_BALANCED_ROWS:
        return tiles, None
    counts = num_tiles(tiles, num_rows, weight.shape[0] // 2)
    return tiles, _choose_deal(counts, num_multiprocessors(rows.device))


def multiply_swiglu(
    x: ProductRows,
    weight: GpuWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: Tiles,
    deal: Deal | None,
    activation: Activation = "silu",
) -> None:
    """Launch both products.

    Args:
        x, weight, bias, activation: See `linear_swiglu`.
        out: [T, F].
        deal: None: a program per tile.
    Mutates: `out`, all of it.
    """
    num_rows, width_f, width_k = len(rows_of(x)), weight.shape[0] // 2, weight.shape[1]
    count_launch("linear_swiglu")
    copied_k = tiles.block_k
    if isinstance(weight, Int4Weight):
        tiles, copied_k = tiles._replace(block_k=weight.block_k), weight.group_size
    rows = row_operand(x, weight)
    values, scales, constants = operands(weight, multiplies_e4m3=rows.multiplies_e4m3)
    blocks = (
        blocks_of(rows.values, tiles.block_t, copied_k),
        blocks_of(values, tiles.block_n, copied_k),
    )
    ends = (values if bias is None else bias.contiguous(), out)
    sizes = (num_rows, width_f, width_k)
    options = {
        "DOT_DTYPE": rows.dot,
        **constants,
        "HAS_BIAS": bias is not None,
        "ACTIVATION": activation,
        "BLOCK_N": tiles.block_n,
        "BLOCK_T": tiles.block_t,
        "BLOCK_K": tiles.block_k,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **dependent_launch(rows.values),
    }
    if deal is None:
        _linear_swiglu_kernel[num_tiles(tiles, num_rows, width_f)](
            *blocks, scales, rows.scales, *ends, *sizes, HAS_FP8_ROWS=rows.has_scales, **options
        )
        return
    assert not rows.has_scales
    places = handover(rows.values.device, deal, 2 * tiles.block_n * tiles.block_t)
    _balanced_swiglu_kernel[(deal.num_groups * deal.num_members,)](
        *blocks, scales, *ends, places, *sizes, *deal, **options
    )


def linear_swiglu_cpu(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> torch.Tensor:
    """Do what `linear_swiglu` does on a CPU."""
    gate, up = linear_cpu(x, weight, bias).chunk(2, dim=-1)
    return swiglu(gate, up, activation)
