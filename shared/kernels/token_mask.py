"""Forbid the tokens that a row's grammar does not allow. Grid: (num_rows, num_chunks)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS, count_launch, use_triton


@triton.jit
def _token_masks_kernel(
    logits_ptr,  # [R, V] f32, rows named by row_index mutated
    row_index_ptr,  # [M] i64
    masks_ptr,  # [M, W] i32
    token_ids_ptr,  # [V] i64, unread unless HAS_IDS
    width,
    num_words,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    out = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < width
    token = column
    if HAS_IDS:
        token = tl.load(token_ids_ptr + column, mask=in_row, other=0)
    word = tl.load(masks_ptr + out * num_words + token // 32, mask=in_row, other=0)
    is_forbidden = ((word >> (token % 32).to(tl.int32)) & 1) == 0
    row_ptr = logits_ptr + tl.load(row_index_ptr + out) * width
    tl.store(row_ptr + column, float("-inf"), mask=in_row & is_forbidden)


def apply_token_masks(
    logits: torch.Tensor,
    row_index: torch.Tensor,
    masks: torch.Tensor,
    token_ids: torch.Tensor | None = None,
) -> None:
    """Make the logits of forbidden tokens -inf.

    Args:
        logits: [R, V] f32.
        row_index: [M] i64, rows of the logits, each once.
        masks: [M, W] i32; bit i of word w is 1 where token 32 w + i is allowed.
        token_ids: [V] i64, the token of each column; None: its own number.
    Mutates: the rows of `logits` named by `row_index`.
    """
    if not use_triton(logits):
        apply_token_masks_ref(logits, row_index, masks, token_ids)
        return
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    count, width = row_index.shape[0], logits.shape[1]
    if count == 0:
        return
    block = min(1024, triton.next_power_of_2(width))
    count_launch("token_masks")
    _token_masks_kernel[(count, triton.cdiv(width, block))](
        logits,
        row_index.contiguous(),
        masks.contiguous(),
        masks if token_ids is None else token_ids,
        width,
        masks.shape[1],
        HAS_IDS=token_ids is not None,
        BLOCK=block,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )


def compile_token_masks(
    width: int, device: torch.device, token_ids: torch.Tensor | None = None
) -> None:
    """Compile the kernel for logits of this width, before anybody waits for it."""
    logits = torch.zeros(1, width, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    most = width if token_ids is None else int(token_ids.max()) + 1
    masks = torch.zeros(1, -(-most // 32), dtype=torch.int32, device=device)
    apply_token_masks(logits, row, masks, token_ids)


def apply_token_masks_ref(
    logits: torch.Tensor,
    row_index: torch.Tensor,
    masks: torch.Tensor,
    token_ids: torch.Tensor | None = None,
) -> None:
    """Do what `apply_token_masks` does in plain torch."""
    bit = torch.arange(32, dtype=torch.int32, device=masks.device)
    is_allowed = ((masks.unsqueeze(2) >> bit) & 1).bool().flatten(1)  # [M, 32 W]
    if token_ids is None:
        is_allowed = is_allowed[:, : logits.shape[1]]
    else:
        is_allowed = is_allowed[:, token_ids]
    logits[row_index] = logits[row_index].masked_fill(~is_allowed, -torch.inf)
