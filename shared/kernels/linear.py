"""Matrix product whose rows do not depend on each other: y = x W^T + b.

The weights are the wide operand of every dot and the tokens the narrow one. K is cut into splits,
whose number is a function of the weight's shape alone: each split is accumulated from zero, in
order of k, and the splits are added in order. Few rows stream the weights, so each split is a
program and the addends go to memory; many rows compute, so one program walks all splits, of a tile
or, where tiles would leave multiprocessors idle, of its share of all tiles
(`shared/kernels/linear_balanced.py`). A row's bits are the same either way.

Grid: (tiles of T, tiles of N, splits or 1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.balanced_tiles import Deal, handover
from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton
from shared.kernels.fp8_rows import ProductRows, becomes_fp8, row_operand, rows_of
from shared.kernels.int4 import SPLIT_MULTIPLE, Int4Weight
from shared.kernels.linear_balanced import _balanced_linear_kernel
from shared.kernels.linear_tiles import (
    INTERPRETED_TILES,
    MAX_FP8_SPLIT_ROWS,
    MAX_SPLIT_ROWS,
    SQUARE_FP8_TILES,
    SQUARE_TILES,
    Tiles,
    choose_deal,
    choose_fp8_row_tiles,
    choose_fp8_tiles,
    choose_int4_tiles,
    choose_tiles,
    num_splits,
    num_tiles,
    split_width,
)
from shared.kernels.linear_two_tiles import fits_two_tiles, linear_two_tiles
from shared.kernels.products_cpu import CpuWeight, Weight, linear_cpu
from shared.kernels.quantized import (
    GpuWeight,
    QuantizedWeight,
    add_blocks,
    operands,
    scale_rows,
    scale_sum,
    values_of,
)
from shared.kernels.tensor_blocks import blocks_of


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_desc,  # [T, K] in blocks [BLOCK_T, BLOCK_K]
    weight_desc,  # [N, K] in blocks [BLOCK_N, BLOCK_K]
    scales_ptr,  # see `add_blocks`, unread if SCALING is "none"
    row_scales_ptr,  # [T] f32, unread unless HAS_FP8_ROWS
    bias_ptr,  # [N], unread unless HAS_BIAS
    out_ptr,  # [T, N], or [splits, T, N] f32 if IS_SPLIT; mutated
    num_rows,
    width_n,
    width_k,
    DOT_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_FP8_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    first_t = tl.program_id(0) * BLOCK_T
    first_n = tl.program_id(1) * BLOCK_N
    first_split = tl.program_id(2)
    t = first_t + tl.arange(0, BLOCK_T)
    n = first_n + tl.arange(0, BLOCK_N)
    wait_for_previous(IS_DEPENDENT)
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for split in range(0, 1 if IS_SPLIT else NUM_SPLITS):
        begin = (first_split + split) * SPLIT_K
        # At least one block, of zeros if K is out: were the loop one that may not run at all, ptxas
        # would let each product wait for the one before it.
        end = tl.maximum(tl.minimum(begin + SPLIT_K, width_k), begin + 1)
        tl.assume(begin < end)
        acc = add_blocks(
            tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32),
            x_desc,
            weight_desc,
            scales_ptr,
            first_t,
            first_n,
            begin,
            end,
            width_n,
            width_k,
            DOT_DTYPE,
            SCALING,
            GROUP,
            HAS_FP8_ROWS,
            BLOCK_N,
            BLOCK_K,
        )
        acc = scale_sum(acc, scales_ptr, n, width_n, SCALING)
        acc = scale_rows(acc, row_scales_ptr, t, t < num_rows, HAS_FP8_ROWS)
        if NUM_SPLITS == 1 or IS_SPLIT:
            total = acc
        else:
            total += acc
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < width_n, other=0.0).to(tl.float32)[:, None]
    row = t.to(tl.int64)
    if IS_SPLIT:
        row += first_split.to(tl.int64) * num_rows
    tl.store(
        out_ptr + row[None, :] * width_n + n[:, None],
        total.to(out_ptr.dtype.element_ty),
        mask=(t < num_rows)[None, :] & (n < width_n)[:, None],
    )


@triton.jit
def _sum_addends_kernel(
    addends_ptr,  # [S, T, N] f32
    bias_ptr,  # [N], unread unless HAS_BIAS
    x_ptr,  # [T, N], unread unless HAS_RESIDUAL
    out_ptr,  # [T, N] mutated
    num_values,  # T * N
    width_n,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    value = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_out = value < num_values
    total = sum_addends_block(addends_ptr, value, num_values, in_out, NUM_SPLITS)
    if HAS_BIAS:
        total += tl.load(bias_ptr + value % width_n, mask=in_out, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if HAS_RESIDUAL:
        x = tl.load(x_ptr + value, mask=in_out, other=0.0).to(tl.float32)
        total = x + total.to(dtype).to(tl.float32)
    tl.store(out_ptr + value, total.to(dtype), mask=in_out)


@triton.jit
def sum_addends_block(addends_ptr, offset, split_stride, mask, NUM_SPLITS: tl.constexpr):
    """Return the sum of the addends of a block of outputs, in order of splits; device function.

    Args:
        offset: Of each output in an addend, i64 block.
        split_stride: Values of one addend.
    """
    total = tl.load(addends_ptr + offset, mask=mask, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(addends_ptr + split * split_stride + offset, mask=mask, other=0.0)
    return total


def linear(
    x: ProductRows,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply rows by a weight; a row's bits do not depend on the other rows or their number.

    Args:
        x: [T, K], maybe with their FP8, which only a weight that wants it reads.
        weight: [N, K], dtype of x; in FP8; or packed, if a CPU computes with it often.
        bias: [N] or None.
        out_dtype: dtype of the result; None: that of x.
    Returns: [T, N], accumulated in float32.
    """
    rows = rows_of(x)
    if isinstance(weight, CpuWeight) or not use_triton(rows):
        return linear_cpu(rows, weight, bias, out_dtype=out_dtype)
    num_rows, width_n = rows.shape[0], weight.shape[0]
    dtype = out_dtype or rows.dtype
    if splits_of(weight) > 1 and num_rows <= most_split_rows(weight):
        return sum_addends(linear_addends(x, weight), bias, dtype)
    out = torch.empty((num_rows, width_n), dtype=dtype, device=rows.device)
    if num_rows:
        _multiply(x, weight, bias, out, is_split=False)
    return out


def num_addends(num_rows: int, weight: Weight) -> int:
    """Return how many addends `linear_addends` returns of so many rows."""
    if isinstance(weight, CpuWeight) or num_rows > most_split_rows(weight):
        return 1
    if not use_triton(values_of(weight)):
        return 1
    return splits_of(weight)


def splits_of(weight: GpuWeight) -> int:
    """Return into how many parts K of a weight is cut, by its form and shape alone."""
    return num_splits(*weight.shape, has_fp8_rows=_has_fp8_rows(weight))


def most_split_rows(weight: GpuWeight) -> int:
    """Return how many rows have a program for each split at most."""
    return MAX_FP8_SPLIT_ROWS if _has_fp8_rows(weight) else MAX_SPLIT_ROWS


def _has_fp8_rows(weight: GpuWeight) -> bool:
    return isinstance(weight, QuantizedWeight) and weight.has_fp8_rows


def linear_addends(
    x: ProductRows, weight: Weight, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the addends of x W^T, for a kernel that adds them up on its way.

    Added in order they give, bit for bit, what `linear` rounds when there is no bias.

    Args:
        x, weight: See `linear`.
        out: [S, T, N] f32, dense, to hold them; None: new memory.
    Returns: [S, T, N] f32; S depends on T and the weight's shape, see `num_addends`.
    Mutates: `out`, all of it.
    """
    rows = rows_of(x)
    if isinstance(weight, CpuWeight) or not use_triton(rows):
        product = linear_cpu(rows, weight, out_dtype=torch.float32).unsqueeze(0)
        return product if out is None else out.copy_(product)
    shape = (num_addends(len(rows), weight), len(rows), weight.shape[0])
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=rows.device)
    assert out.shape == shape and out.is_contiguous()
    if len(rows):
        _multiply(x, weight, None, out, is_split=len(out) > 1)
    return out


def sum_addends(
    addends: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add addends up in order, then a bias, and round; then add a residual stream.

    Args:
        addends: [S, T, N] f32.
        bias: [N] or None.
        residual: [T, N] in `dtype`, or None.
    Returns: [T, N] in `dtype`.
    """
    if not use_triton(addends):
        return sum_addends_ref(addends, bias, dtype, residual)
    assert residual is None or (residual.dtype == dtype and residual.shape == addends.shape[1:])
    splits, num_rows, width_n = addends.shape
    out = torch.empty((num_rows, width_n), dtype=dtype, device=addends.device)
    if num_rows == 0:
        return out
    block = 1024
    count_launch("sum_addends")
    _sum_addends_kernel[(triton.cdiv(out.numel(), block),)](
        addends,
        addends if bias is None else bias.contiguous(),
        addends if residual is None else residual.contiguous(),
        out,
        out.numel(),
        width_n,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        NUM_SPLITS=splits,
        BLOCK=block,
        num_warps=4,
        **dependent_launch(addends),
    )
    return out


def _multiply(
    x: ProductRows,
    weight: GpuWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    is_split: bool,
) -> None:
    """Launch the product. Mutates: `out`, all of it."""
    rows = rows_of(x)
    assert rows.dtype == weight.dtype and rows.shape[1] == weight.shape[1]
    tiles, deal = INTERPRETED_TILES, None
    if rows.is_cuda and isinstance(weight, torch.Tensor) and fits_two_tiles(rows):
        linear_two_tiles(rows, weight, bias, out, splits=splits_of(weight))
        return
    if rows.is_cuda:
        num_rows, size, shape = len(rows), rows.element_size(), (weight.shape[0], weight.shape[1])
        deal = choose_deal(num_rows, *shape) if size == 2 else None
        if isinstance(weight, Int4Weight):
            tiles, deal = choose_int4_tiles(num_rows, size, weight.block_k), None
        elif isinstance(weight, QuantizedWeight):
            by_block = weight.scaling == "block"
            tiles = choose_fp8_tiles(num_rows, size, shape, by_block=by_block)
            if becomes_fp8(rows, weight):
                tiles, deal = choose_fp8_row_tiles(num_rows, shape, by_block=by_block), None
            tiles = SQUARE_FP8_TILES if deal else tiles
        else:
            tiles = SQUARE_TILES if deal else choose_tiles(num_rows, size, shape[0])
    multiply(x, weight, bias, out, tiles, deal, is_split=is_split)


def multiply(
    x: ProductRows,
    weight: GpuWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: Tiles,
    deal: Deal | None,
    *,
    is_split: bool = False,
) -> None:
    """Launch the product.

    Args:
        x, weight, bias: See `linear`.
        out: [T, N], or addends.
        deal: None: a program per tile and, if the product is split, split.
    Mutates: `out`, all of it.
    """
    num_rows, (width_n, width_k) = len(rows_of(x)), weight.shape
    splits = splits_of(weight)
    split_k = split_width(width_k, splits)
    copied_k = tiles.block_k
    if isinstance(weight, Int4Weight):
        split_k = split_width(width_k, splits, SPLIT_MULTIPLE)
        tiles, copied_k = tiles._replace(block_k=weight.block_k), weight.group_size
    count_launch("linear")
    rows = row_operand(x, weight)
    values, scales, constants = operands(weight, multiplies_e4m3=rows.multiplies_e4m3)
    blocks = (
        blocks_of(rows.values, tiles.block_t, copied_k),
        blocks_of(values, tiles.block_n, copied_k),
    )
    ends = (values if bias is None else bias.contiguous(), out)
    options = {
        "DOT_DTYPE": constants.get("DOT_DTYPE", rows.dot),
        "SCALING": constants["SCALING"],
        "HAS_BIAS": bias is not None,
        "NUM_SPLITS": splits,
        "BLOCK_N": tiles.block_n,
        "BLOCK_T": tiles.block_t,
        "BLOCK_K": tiles.block_k,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **dependent_launch(rows.values),
    }
    if deal is None:
        tile_grid = num_tiles(tiles, num_rows, width_n)
        _linear_kernel[(*tile_grid, splits if is_split else 1)](
            *blocks,
            scales,
            rows.scales,
            *ends,
            num_rows,
            width_n,
            width_k,
            GROUP=constants["GROUP"],
            HAS_FP8_ROWS=rows.has_scales,
            IS_SPLIT=is_split,
            SPLIT_K=split_k,
            **options,
        )
        return
    assert not is_split and split_k * splits == width_k and split_k % tiles.block_k == 0
    places = handover(rows.values.device, deal, tiles.block_n * tiles.block_t)
    _balanced_linear_kernel[(deal.num_groups * deal.num_members,)](
        *blocks,
        scales,
        *ends,
        places,
        num_rows,
        width_n,
        *deal,
        SPLIT_BLOCKS=split_k // tiles.block_k,
        **options,
    )


def sum_addends_ref(
    addends: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `sum_addends` does in plain torch."""
    total, *others = addends.unbind()
    for addend in others:
        total = total + addend
    if bias is not None:
        total = total + bias.float()
    if total.dtype != dtype:
        total = total.to(dtype)
    return total if residual is None else residual + total
