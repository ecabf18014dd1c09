"""The input of an EAGLE-3 layer: a token's embedding and a hidden row, each normed, side by side.

Grid: (num_rows, 2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import aligned, count_launch, use_triton
from shared.kernels.embedding import embed_ref
from shared.kernels.rms_norm import normalise_block, rms_norm_ref


@triton.jit
def _norm_row(x_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Normalise a row as `rms_norm` does."""
    column = tl.arange(0, BLOCK)
    in_row = column < WIDTH
    x = tl.load(x_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    out = normalise_block(x, weight, eps, WIDTH, dtype)
    tl.store(out_ptr + column, out.to(dtype), mask=in_row)


@triton.jit
def _head_input_kernel(
    token_ids_ptr,  # [T] i64
    table_ptr,  # [V, h]
    hidden_ptr,  # [T, h]
    table_weight_ptr,  # [h]
    hidden_weight_ptr,  # [h]
    out_ptr,  # [T, 2 h] mutated
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row * 2 * WIDTH
    if tl.program_id(1) == 0:
        token_id = tl.load(token_ids_ptr + row)
        _norm_row(table_ptr + token_id * WIDTH, table_weight_ptr, out_ptr, eps, WIDTH, BLOCK)
    else:
        hidden_ptr += row * WIDTH
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
    assert table.is_contiguous() and token_ids.is_contiguous() and hidden.dtype == table.dtype
    hidden = aligned(hidden)
    num_rows, width = hidden.shape
    out = torch.empty((num_rows, 2 * width), dtype=table.dtype, device=table.device)
    if num_rows == 0:
        return out
    count_launch("head_input")
    _head_input_kernel[(num_rows, 2)](
        token_ids,
        table,
        hidden,
        *norms,
        out,
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
        **dependent_launch(table),
    )
    return out


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
