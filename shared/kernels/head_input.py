"""The input of an EAGLE-3 layer: a token's embedding and a hidden row, each normed, side by side.

Grid: (num_rows, 2), or (num_rows, 1) if a row is wanted in FP8, which has one scale for both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import aligned, count_launch, use_triton
from shared.kernels.embedding import embed_ref
from shared.kernels.fp8_rows import (
    Fp8Rows,
    empty_fp8,
    largest_of,
    quantize_rows_ref,
    scale_of,
    store_fp8,
)
from shared.kernels.rms_norm import normalise_block, rms_norm_ref


@triton.jit
def _norm_row(x_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Normalise a row as `rms_norm` does, and return what is stored. [BLOCK] f32."""
    column = tl.arange(0, BLOCK)
    in_row = column < WIDTH
    x = tl.load(x_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    out = normalise_block(x, weight, eps, WIDTH, dtype).to(dtype)
    tl.store(out_ptr + column, out, mask=in_row)
    return out.to(tl.float32)


@triton.jit
def _head_input_kernel(
    token_ids_ptr,  # [T] i64
    table_ptr,  # [V, h]
    hidden_ptr,  # [T, h]
    table_weight_ptr,  # [h]
    hidden_weight_ptr,  # [h]
    out_ptr,  # [T, 2 h] mutated
    values_ptr,  # [T, 2 h] e4m3 or u8 mutated if HAS_FP8
    scales_ptr,  # [T] f32 mutated if HAS_FP8
    eps,
    HAS_FP8: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row * 2 * WIDTH
    hidden_ptr += row * WIDTH
    if HAS_FP8:
        table_ptr += tl.load(token_ids_ptr + row) * WIDTH
        first = _norm_row(table_ptr, table_weight_ptr, out_ptr, eps, WIDTH, BLOCK)
        second = _norm_row(hidden_ptr, hidden_weight_ptr, out_ptr + WIDTH, eps, WIDTH, BLOCK)
        scale, factor = scale_of(tl.maximum(largest_of(first), largest_of(second)))
        column = tl.arange(0, BLOCK)
        values_ptr += row * 2 * WIDTH
        store_fp8(first, factor, values_ptr, column, WIDTH)
        store_fp8(second, factor, values_ptr + WIDTH, column, WIDTH)
        tl.store(scales_ptr + row, scale)
    elif tl.program_id(1) == 0:
        table_ptr += tl.load(token_ids_ptr + row) * WIDTH
        _norm_row(table_ptr, table_weight_ptr, out_ptr, eps, WIDTH, BLOCK)
    else:
        _norm_row(hidden_ptr, hidden_weight_ptr, out_ptr + WIDTH, eps, WIDTH, BLOCK)


def head_input(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    hidden: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> torch.Tensor:
    """Look tokens up and put them beside hidden rows, both normed.

    Args:
        token_ids: [T] i64.
        table: [V, h].
        hidden: [T, h], dtype of the table.
        norms: Weights [h] of the norms of embeddings and of hidden rows.
        eps: Of both.
    Returns: [T, 2 h] in the dtype of the table.
    """
    if not use_triton(table):
        return head_input_ref(token_ids, table, hidden, norms, eps)
    out = hidden.new_empty((len(hidden), 2 * hidden.shape[1]))
    _launch(token_ids, table, hidden, norms, eps, out, None)
    return out


def head_input_fp8(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    hidden: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> Fp8Rows:
    """Return what `head_input` returns, and the same in FP8; of tables of 16 bits."""
    if not use_triton(table):
        return quantize_rows_ref(head_input_ref(token_ids, table, hidden, norms, eps))
    fp8 = empty_fp8(hidden.new_empty((len(hidden), 2 * hidden.shape[1])))
    _launch(token_ids, table, hidden, norms, eps, fp8.rows, fp8)
    return fp8


def _launch(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    hidden: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    out: torch.Tensor,
    fp8: Fp8Rows | None,
) -> None:
    """Launch the kernel. Mutates: `out` and `fp8`, all of them."""
    assert table.is_contiguous() and token_ids.is_contiguous() and hidden.dtype == table.dtype
    hidden = aligned(hidden)
    num_rows, width = hidden.shape
    if num_rows == 0:
        return
    count_launch("head_input")
    _head_input_kernel[(num_rows, 2 if fp8 is None else 1)](
        token_ids,
        table,
        hidden,
        *norms,
        out,
        out if fp8 is None else fp8.values,
        out if fp8 is None else fp8.scales,
        eps,
        HAS_FP8=fp8 is not None,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
        **dependent_launch(table),
    )


def head_input_ref(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    hidden: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> torch.Tensor:
    """Do what `head_input` does in plain torch."""
    embeddings = rms_norm_ref(embed_ref(token_ids, table), norms[0], eps)
    return torch.cat([embeddings, rms_norm_ref(hidden, norms[1], eps)], dim=-1)
