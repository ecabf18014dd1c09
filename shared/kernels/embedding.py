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
    roots_ptr,  # [num_reqs] i64
    root_idx_ptr,  # [T] i64, -1: the token is in token_ids
    table_ptr,  # [V, h]
    out_ptr,  # [T, h] mutated
    multiplier,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ROOTS: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + row).to(tl.int64)
    if HAS_ROOTS:
        root_idx = tl.load(root_idx_ptr + row).to(tl.int64)
        if root_idx >= 0:
            token_id = tl.load(roots_ptr + root_idx).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_row = column < WIDTH
    values = tl.load(table_ptr + token_id * WIDTH + column, mask=in_row, other=0.0)
    if HAS_MULTIPLIER:
        values = (values.to(tl.float32) * multiplier).to(values.dtype)
    tl.store(out_ptr + row * WIDTH + column, values, mask=in_row)


def embed(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    roots: torch.Tensor | None = None,
    root_idx: torch.Tensor | None = None,
    *,
    multiplier: float = 1.0,
) -> torch.Tensor:
    """Return the embeddings of tokens.

    Args:
        token_ids: [T] i64 or i32.
        table: [V, h].
        roots: [num_reqs] i64, the newest token of each request, or None.
        root_idx: [T] i64, which of the roots a row's token is; -1: `token_ids` has it. Given with
            `roots`.
        multiplier: What they are multiplied by.
    Returns: [T, h] in the dtype of the table.
    """
    if not use_triton(table):
        return embed_ref(token_ids, table, roots, root_idx, multiplier=multiplier)
    assert table.is_contiguous() and token_ids.is_contiguous()
    num_rows, width = len(token_ids), table.shape[1]
    out = torch.empty((num_rows, width), dtype=table.dtype, device=table.device)
    if num_rows == 0:
        return out
    count_launch("embed")
    has_roots = roots is not None and root_idx is not None
    _embed_kernel[(num_rows,)](
        token_ids,
        roots if has_roots else token_ids,
        root_idx if has_roots else token_ids,
        table,
        out,
        multiplier,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        HAS_ROOTS=has_roots,
        HAS_MULTIPLIER=multiplier != 1,
        num_warps=4,
        **dependent_launch(table),
    )
    return out


def embed_ref(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    roots: torch.Tensor | None = None,
    root_idx: torch.Tensor | None = None,
    *,
    multiplier: float = 1.0,
) -> torch.Tensor:
    """Do what `embed` does in plain torch."""
    if roots is not None and root_idx is not None:
        token_ids = torch.where(root_idx >= 0, roots[root_idx.clamp(min=0)], token_ids)
    values = functional.embedding(token_ids, table)
    return values if multiplier == 1 else values * multiplier
