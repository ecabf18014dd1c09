"""Feed-forwards of which each row passes a few: the products of rows by their experts' weights.

The weights of an expert are the wide operand of every dot and its rows the narrow one, and k is
walked in one order whatever the number of rows: a row's bits do not depend on who else is there.
Few pairs of row and expert have a program each per tile of outputs; of many, ordered by expert, a
program has all rows of an expert, so that its weights are read once, or some tiles of them.

Grid: (programs that share an expert's rows, tiles of outputs, pairs or experts).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import aligned, count_launch, use_triton
from shared.kernels.expert_choice import ChosenExperts
from shared.kernels.expert_order import order_pairs
from shared.kernels.expert_products_cpu import (
    PLAIN_FORM,
    ExpertForm,
    ExpertWeights,
    KernelWeights,
    apply_experts_cpu,
)
from shared.kernels.expert_tiles import (
    Grid,
    Operands,
    choose_grid,
    down_tiles,
    expert_operands,
    up_tiles,
)
from shared.kernels.fp8_rows import ProductRows, RowOperand, row_operand, rows_of
from shared.kernels.mxfp4 import MXFP4_BLOCK, NUM_PARTS, from_mxfp4
from shared.kernels.quantized import (
    SCALE_BLOCK,
    add_product,
    from_e4m3,
    load_block_scales,
    load_weight,
    scale_rows,
    scale_sum,
)
from shared.kernels.swiglu_blocks import gelu_argument

_PART, _PARTS = tl.constexpr(MXFP4_BLOCK), tl.constexpr(NUM_PARTS)
_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit
def _pairs_of(item, ids_ptr, indptr_ptr, IS_DIRECT: tl.constexpr):
    """Return an item's expert, and where in the order its pairs begin and end."""
    if IS_DIRECT:
        expert = tl.load(ids_ptr + item)
        begin = item
        end = item + 1
    else:
        expert = item
        begin = tl.load(indptr_ptr + item)
        end = tl.load(indptr_ptr + item + 1)
    return expert, begin, end


@triton.jit
def _pairs_at(pairs_ptr, place, end, IS_DIRECT: tl.constexpr):
    """Return the pairs at places of the order; past the end the last one again."""
    place = tl.minimum(place, end - 1)
    if IS_DIRECT:
        return place
    return tl.load(pairs_ptr + place)


@triton.jit
def _rows_at(
    x_ptrs,
    k,
    column,
    width_k,
    IS_WHOLE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    HAS_FP8_ROWS: tl.constexpr,
):
    """Return values [k, k + columns) of rows as operand of a product; 0 past the last one."""
    if IS_WHOLE:
        x = tl.load(x_ptrs + k)
    else:
        x = tl.load(x_ptrs + k, mask=(k + column < width_k)[None, :], other=0.0)
    if HAS_FP8_ROWS:
        x = from_e4m3(x, DOT_DTYPE)
    else:
        x = x.to(DOT_DTYPE)
    return x


@triton.jit
def _scales_before(expert, width_k, SCALING: tl.constexpr):
    """Return how many rows of scales lie before those of an expert in FP8."""
    if SCALING == "block":
        return expert.to(tl.int64) * tl.cdiv(width_k, _SCALE_BLOCK)
    return expert.to(tl.int64)


@triton.jit
def _activated(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return what `swiglu` or `clamped_swiglu` returns; NaN stays NaN."""
    if LIMIT == 0:
        inner = gate
        if ACTIVATION == "gelu_tanh":
            inner = gelu_argument(gate)
        return tl.div_rn(gate, 1.0 + tl.exp(-inner)) * up
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, up)
    up = tl.where(up < -LIMIT, -LIMIT, up)
    return tl.div_rn(gate, 1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)


@triton.jit(do_not_specialize=["num_lanes"])
def _expert_swiglu_kernel(
    x_ptr,  # [T, K]
    weight_desc,  # [E * 2 F, K] in blocks [BLOCK_N, BLOCK_K]; of each expert gate above up
    scales_ptr,  # [E, blocks, 2 F] i32 if IS_MXFP4, where the weight is one of words; f32, of a
    # weight in FP8, with one block if SCALING is "channel"; unread if it is "none"
    row_scales_ptr,  # [T] f32, unread unless HAS_FP8_ROWS
    ids_ptr,  # [P] i32
    pairs_ptr,  # [P] i32, unread if IS_DIRECT
    indptr_ptr,  # [E + 2] i32, unread if IS_DIRECT
    bias_ptr,  # [E, 2 F], unread unless HAS_BIAS
    out_ptr,  # [P, F] mutated
    width_f,
    width_k,
    num_lanes,
    NUM_EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_DIRECT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_MXFP4: tl.constexpr,
    SCALING: tl.constexpr,
    HAS_FP8_ROWS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    first_n = tl.program_id(1) * BLOCK_N
    expert, begin, end = _pairs_of(tl.program_id(2), ids_ptr, indptr_ptr, IS_DIRECT)
    # Pairs of padding get zeros. Their block of weights is outside of the matrix: nothing is read.
    is_expert = expert < NUM_EXPERTS
    end_k = tl.where(is_expert, width_k, 1)
    tl.assume(end_k > 0)
    first_row = expert * 2 * width_f + first_n
    n = first_n + tl.arange(0, BLOCK_N)
    column = tl.arange(0, _PART if IS_MXFP4 else BLOCK_K)
    if SCALING != "none":
        scales_ptr += _scales_before(expert, width_k, SCALING) * 2 * width_f
    gate_n = tl.where(is_expert & (n < width_f), n, 2 * width_f)  # that of padding has no scale
    if HAS_BIAS:
        bias_ptr += expert.to(tl.int64) * 2 * width_f
        is_biased = (n < width_f) & is_expert
        gate_bias = tl.load(bias_ptr + n, mask=is_biased, other=0.0).to(tl.float32)
        up_bias = tl.load(bias_ptr + width_f + n, mask=is_biased, other=0.0).to(tl.float32)
    by_gate = tl.zeros((BLOCK_N,), dtype=tl.float32)
    by_up = tl.zeros((BLOCK_N,), dtype=tl.float32)
    # Scales of gate and up lie in one row of 2 F.
    width_n = 2 * width_f
    up_n = tl.where(is_expert & (n < width_f), n + width_f, width_n)
    for first in range(begin + tl.program_id(0) * BLOCK_T, end, num_lanes * BLOCK_T):
        place = first + tl.arange(0, BLOCK_T)
        in_pairs = place < end
        pair = _pairs_at(pairs_ptr, place, end, IS_DIRECT).to(tl.int64)
        row = pair // SLOTS
        x_ptrs = x_ptr + row[:, None] * width_k + column[None, :]
        if SCALING == "block":  # loaded a block ahead, see `add_blocks`
            by_gate = load_block_scales(scales_ptr, gate_n, 0, width_n, width_k)
            by_up = load_block_scales(scales_ptr, up_n, 0, width_n, width_k)
        gate = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        for k in range(0, end_k, BLOCK_K):
            if IS_MXFP4:
                gate_words = weight_desc.load([first_row, k // _PARTS])
                up_words = weight_desc.load([first_row + width_f, k // _PARTS])
                block = (expert * tl.cdiv(width_k, BLOCK_K) + k // BLOCK_K) * 2
                block_ptr = scales_ptr + block * width_f + n
                has_scale = (n < width_f) & is_expert
                gate_scales = tl.load(block_ptr, mask=has_scale, other=0)
                up_scales = tl.load(block_ptr + width_f, mask=has_scale, other=0)
                for part in tl.static_range(_PARTS):
                    of_part = column + part * _PART
                    x = _rows_at(
                        x_ptrs + part * _PART,
                        k,
                        of_part,
                        width_k,
                        IS_WHOLE,
                        DOT_DTYPE,
                        HAS_FP8_ROWS,
                    )
                    gate_weight = from_mxfp4(gate_words, gate_scales, part, DOT_DTYPE)
                    up_weight = from_mxfp4(up_words, up_scales, part, DOT_DTYPE)
                    gate = tl.dot(gate_weight, x.T, gate, input_precision="ieee")
                    up = tl.dot(up_weight, x.T, up, input_precision="ieee")
            else:
                if SCALING == "block":
                    next_k = k + BLOCK_K
                    next_gate = load_block_scales(scales_ptr, gate_n, next_k, width_n, width_k)
                    next_up = load_block_scales(scales_ptr, up_n, next_k, width_n, width_k)
                x = _rows_at(x_ptrs, k, column, width_k, IS_WHOLE, DOT_DTYPE, HAS_FP8_ROWS)
                gate_weight = load_weight(weight_desc, first_row, k, DOT_DTYPE, SCALING)
                up_weight = load_weight(weight_desc, first_row + width_f, k, DOT_DTYPE, SCALING)
                gate = add_product(gate, gate_weight, x, by_gate, SCALING)
                up = add_product(up, up_weight, x, by_up, SCALING)
                if SCALING == "block":
                    by_gate = next_gate
                    by_up = next_up
        gate = scale_sum(gate, scales_ptr, gate_n, width_n, SCALING)
        up = scale_sum(up, scales_ptr, up_n, width_n, SCALING)
        gate = scale_rows(gate, row_scales_ptr, row, in_pairs, HAS_FP8_ROWS)
        up = scale_rows(up, row_scales_ptr, row, in_pairs, HAS_FP8_ROWS)
        if HAS_BIAS:
            gate += gate_bias[:, None]
            up += up_bias[:, None]
        out = _activated(gate, up, LIMIT, ALPHA, ACTIVATION)
        tl.store(
            out_ptr + pair[None, :] * width_f + n[:, None],
            tl.where(is_expert, out, 0.0).to(out_ptr.dtype.element_ty),
            mask=in_pairs[None, :] & (n < width_f)[:, None],
        )


@triton.jit(do_not_specialize=["num_rows", "num_lanes"])
def _expert_down_kernel(
    x_ptr,  # [P, K]
    weight_desc,  # [E * N, K] in blocks [BLOCK_N, BLOCK_K]
    scales_ptr,  # [E, blocks, N], as above
    row_scales_ptr,  # [P] f32, likewise
    ids_ptr,  # [P] i32
    pairs_ptr,  # [P] i32, unread if IS_DIRECT
    indptr_ptr,  # [E + 2] i32, unread if IS_DIRECT
    weights_ptr,  # [P] f32
    bias_ptr,  # [E, N], unread unless HAS_BIAS
    out_ptr,  # [SLOTS, T, N] f32 mutated
    num_rows,
    width_n,
    width_k,
    num_lanes,
    NUM_EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_DIRECT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_MXFP4: tl.constexpr,
    SCALING: tl.constexpr,
    HAS_FP8_ROWS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    first_n = tl.program_id(1) * BLOCK_N
    expert, begin, end = _pairs_of(tl.program_id(2), ids_ptr, indptr_ptr, IS_DIRECT)
    end_k = tl.where(expert < NUM_EXPERTS, width_k, 1)  # zeros for padding, as above
    tl.assume(end_k > 0)
    first_row = expert * width_n + first_n
    n = first_n + tl.arange(0, BLOCK_N)
    column = tl.arange(0, _PART if IS_MXFP4 else BLOCK_K)
    if SCALING != "none":
        scales_ptr += _scales_before(expert, width_k, SCALING) * width_n
    scaled_n = tl.where(expert < NUM_EXPERTS, n, width_n)
    if HAS_BIAS:
        bias_ptr += expert.to(tl.int64) * width_n
        is_biased = (n < width_n) & (expert < NUM_EXPERTS)
        bias = tl.load(bias_ptr + n, mask=is_biased, other=0.0).to(tl.float32)
    by_output = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first in range(begin + tl.program_id(0) * BLOCK_T, end, num_lanes * BLOCK_T):
        place = first + tl.arange(0, BLOCK_T)
        in_pairs = place < end
        pair = _pairs_at(pairs_ptr, place, end, IS_DIRECT).to(tl.int64)
        x_ptrs = x_ptr + pair[:, None] * width_k + column[None, :]
        if SCALING == "block":
            by_output = load_block_scales(scales_ptr, scaled_n, 0, width_n, width_k)
        total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        for k in range(0, end_k, BLOCK_K):
            if IS_MXFP4:
                words = weight_desc.load([first_row, k // _PARTS])
                block = expert * tl.cdiv(width_k, BLOCK_K) + k // BLOCK_K
                has_scale = (n < width_n) & (expert < NUM_EXPERTS)
                scales = tl.load(scales_ptr + block * width_n + n, mask=has_scale, other=0)
                for part in tl.static_range(_PARTS):
                    of_part = column + part * _PART
                    x = _rows_at(
                        x_ptrs + part * _PART,
                        k,
                        of_part,
                        width_k,
                        IS_WHOLE,
                        DOT_DTYPE,
                        HAS_FP8_ROWS,
                    )
                    weight = from_mxfp4(words, scales, part, DOT_DTYPE)
                    total = tl.dot(weight, x.T, total, input_precision="ieee")
            else:
                if SCALING == "block":
                    next_k = k + BLOCK_K
                    next_output = load_block_scales(scales_ptr, scaled_n, next_k, width_n, width_k)
                x = _rows_at(x_ptrs, k, column, width_k, IS_WHOLE, DOT_DTYPE, HAS_FP8_ROWS)
                weight = load_weight(weight_desc, first_row, k, DOT_DTYPE, SCALING)
                total = add_product(total, weight, x, by_output, SCALING)
                if SCALING == "block":
                    by_output = next_output
        total = scale_sum(total, scales_ptr, scaled_n, width_n, SCALING)
        total = scale_rows(total, row_scales_ptr, pair, in_pairs, HAS_FP8_ROWS)
        if HAS_BIAS:
            total += bias[:, None]
        total *= tl.load(weights_ptr + pair)[None, :]
        addend = (pair % SLOTS) * num_rows + pair // SLOTS
        tl.store(
            out_ptr + addend[None, :] * width_n + n[:, None],
            total,
            mask=in_pairs[None, :] & (n < width_n)[:, None],
        )


def apply_experts(
    x: ProductRows,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    chosen: ChosenExperts,
    out: torch.Tensor,
    form: ExpertForm = PLAIN_FORM,
) -> None:
    """Compute w * W_down (f(W_gate x) * W_up x) of each row's experts, as addends of their sum.

    A row's bits depend on its values, its experts and their weights alone. Between the products
    values are float32, rounded once to the dtype of x before the second one.

    Args:
        x: [T, K], maybe with their FP8, which only a weight that wants it reads.
        gate_up: [E, 2 F, K], the rows of gate above those of up; dtype of x, MXFP4 or FP8.
        down: [E, N, F].
        chosen: Experts of each row.
        out: [count, T, N] f32, in slots as the experts of a row are; zeros in rows of padding.
        form: What else they compute.
    Mutates: `out`, all of it.
    """
    rows = rows_of(x)
    if isinstance(gate_up, Sequence) or isinstance(down, Sequence) or not use_triton(rows):
        apply_experts_cpu(rows, gate_up, down, chosen, out, form)
        return
    num_experts, width_n, width_f = down.shape
    num_rows, count = chosen.ids.shape
    assert out.is_contiguous() and out.shape == (count, num_rows, width_n)
    assert gate_up.dtype == down.dtype == rows.dtype and rows.shape[1] == gate_up.shape[2]
    if num_rows == 0:
        return
    grid = choose_grid(chosen.ids.numel(), num_experts)
    order = (chosen.ids, chosen.ids)
    if not grid.is_direct:
        order = order_pairs(chosen.ids, num_experts)
    inner = torch.empty((num_rows * count, width_f), dtype=rows.dtype, device=rows.device)
    _launch_swiglu(x, gate_up, chosen.ids, order, grid, form, inner)
    _launch_down(inner, down, chosen, order, grid, form.down_bias, out)


def _launch_swiglu(
    x: ProductRows,
    weight: KernelWeights,
    ids: torch.Tensor,
    order: tuple[torch.Tensor, torch.Tensor],
    grid: Grid,
    form: ExpertForm,
    out: torch.Tensor,
) -> None:
    """Launch gate and up. Mutates: `out`, all of it."""
    num_experts, width_f, width_k = weight.shape[0], weight.shape[1] // 2, weight.shape[2]
    rows = row_operand(x, weight)
    tiles = up_tiles(rows_of(x), weight, grid)
    read = expert_operands(weight, tiles, multiplies_e4m3=rows.multiplies_e4m3)
    tiles = read.tiles
    num_lanes = grid.num_lanes(tiles)
    count_launch("expert_swiglu")
    _expert_swiglu_kernel[(num_lanes, triton.cdiv(width_f, tiles.block_n), grid.num_items)](
        aligned(rows.values),
        read.weight,
        read.scales,
        rows.scales,
        ids,
        *order,
        out if form.gate_up_bias is None else form.gate_up_bias,
        out,
        width_f,
        width_k,
        num_lanes,
        HAS_BIAS=form.gate_up_bias is not None,
        LIMIT=form.limit,
        ALPHA=form.alpha,
        ACTIVATION=form.activation,
        **_options(rows, ids, read, grid, num_experts, width_k),
    )


def _launch_down(
    x: torch.Tensor,
    weight: KernelWeights,
    chosen: ChosenExperts,
    order: tuple[torch.Tensor, torch.Tensor],
    grid: Grid,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Launch the second product. Mutates: `out`, all of it."""
    num_experts, width_n, width_k = weight.shape
    rows = row_operand(x, weight)
    tiles = down_tiles(x, weight, grid)
    read = expert_operands(weight, tiles, multiplies_e4m3=rows.multiplies_e4m3)
    tiles = read.tiles
    num_lanes = grid.num_lanes(tiles)
    count_launch("expert_down")
    _expert_down_kernel[(num_lanes, triton.cdiv(width_n, tiles.block_n), grid.num_items)](
        rows.values,
        read.weight,
        read.scales,
        rows.scales,
        chosen.ids,
        *order,
        chosen.weights,
        x if bias is None else bias,
        out,
        len(chosen.ids),
        width_n,
        width_k,
        num_lanes,
        HAS_BIAS=bias is not None,
        **_options(rows, chosen.ids, read, grid, num_experts, width_k),
    )


def _options(
    rows: RowOperand,
    ids: torch.Tensor,
    read: Operands,
    grid: Grid,
    num_experts: int,
    width_k: int,
) -> dict[str, Any]:
    """Return what both products are launched with."""
    tiles = read.tiles
    return {
        **read.constants,
        "NUM_EXPERTS": num_experts,
        "SLOTS": ids.shape[1],
        "IS_DIRECT": grid.is_direct,
        "IS_WHOLE": width_k % tiles.block_k == 0,
        "DOT_DTYPE": rows.dot,
        "HAS_FP8_ROWS": rows.has_scales,
        "BLOCK_N": tiles.block_n,
        "BLOCK_T": tiles.block_t,
        "BLOCK_K": tiles.block_k,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **dependent_launch(rows.values),
    }
