"""Look up the embeddings of tokens, also of tokens that so far only the device knows.

Grid: (num_rows,).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton


@triton.jit
def _embed_kernel(
    token_ids_ptr,  # [T] i64 or i32
    roots_ptr,  # [num_reqs] i64, read for negative token ids only
    table_ptr,  # [V, h]
    out_ptr,  # [T, h] mutated
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + row).to(tl.int64)
    if token_id < 0:
        token_id = tl.load(roots_ptr - 1 - token_id).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_row = column < WIDTH
    values = tl.load(table_ptr + token_id * WIDTH + column, mask=in_row, other=0.0)
    tl.store(out_ptr + row * WIDTH + column, values, mask=in_row)


def embed(
    token_ids: torch.Tensor, table: torch.Tensor, roots: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the embeddings of tokens.

    Args:
        token_ids: [T] i64 or i32; with roots, -1 - i stands for roots[i].
        table: [V, h].
        roots: [num_reqs] i64, the newest token of each request, or None.
    Returns: [T, h] in the dtype of the table.
    """
    if not use_triton(table):
        return embed_ref(token_ids, table, roots)
    assert table.is_contiguous() and token_ids.is_contiguous()
    num_rows, width = len(token_ids), table.shape[1]
    out = torch.empty((num_rows, width), dtype=table.dtype, device=table.device)
    if num_rows == 0:
        return out
    count_launch("embed")
    _embed_kernel[(num_rows,)](
        token_ids,
        token_ids if roots is None else roots,
        table,
        out,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
        **dependent_launch(table),
    )
    return out


def embed_ref(
    token_ids: torch.Tensor, table: torch.Tensor, roots: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what `embed` does in plain torch."""
    if roots is not None:
        is_root = token_ids < 0
        token_ids = torch.where(is_root, roots[(-1 - token_ids).clamp(min=0)], token_ids)
    return functional.embedding(token_ids, table)
