"""Logit processors that run before sampling, in this order: bias, penalties, min_new_tokens mask.

All work in place, on the rows concerned; a row is one tree node with its own path. Grid of the
penalties: (num_rows, num_chunks).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS, count_launch, use_triton


def apply_logit_bias(
    logits: torch.Tensor, row_index: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor
) -> None:
    """Add a bias to single logits.

    Args:
        logits: [R, V] f32.
        row_index: [M] i64.
        token_ids: [M] i64; a (row, id) pair occurs once.
        values: [M] f32.
    Mutates: `logits`.
    """
    logits[row_index, token_ids] += values


@triton.jit(do_not_specialize=["depth"])
def _penalties_kernel(
    logits_ptr,  # [R, V] f32, rows named by row_index mutated
    row_index_ptr,  # [P] i64
    request_index_ptr,  # [P] i64
    prompt_mask_ptr,  # [Q, V] bool
    output_counts_ptr,  # [Q, V] i32
    path_ptr,  # [P, D] i64
    repetition_ptr,  # [P] f32
    presence_ptr,  # [P] f32
    frequency_ptr,  # [P] f32
    width,
    depth,
    BLOCK: tl.constexpr,
):
    out = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < width
    at = tl.load(request_index_ptr + out) * width + column
    count = tl.load(output_counts_ptr + at, mask=in_row, other=0)
    for step in range(depth):
        count += (column == tl.load(path_ptr + out * depth + step)).to(tl.int32)
    is_output = count > 0
    is_seen = is_output | (tl.load(prompt_mask_ptr + at, mask=in_row, other=0) != 0)
    row_ptr = logits_ptr + tl.load(row_index_ptr + out) * width
    x = tl.load(row_ptr + column, mask=in_row, other=0.0)
    factor = tl.load(repetition_ptr + out)
    x = tl.where(is_seen, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
    x -= tl.load(frequency_ptr + out) * count.to(tl.float32)
    x -= tl.load(presence_ptr + out) * is_output.to(tl.float32)
    tl.store(row_ptr + column, x, mask=in_row)


def apply_penalties(
    logits: torch.Tensor,
    *,
    row_index: torch.Tensor,
    request_index: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    path_token_ids: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Penalise the tokens that a row has seen: repetition first, then frequency and presence.

    Repetition counts prompt, output and the row's own path; frequency and presence count output
    and own path.

    Args:
        logits: [R, V] f32.
        row_index: [P] i64, rows of the logits, each once.
        request_index: [P] i64. Row of the two tables.
        prompt_mask: [Q, V] bool. Tokens of the prompt.
        output_counts: [Q, V] i32. Occurrences among the committed output tokens.
        path_token_ids: [P, D] i64. Tokens on the row's path that are not in output_counts yet,
            padded with -1.
        repetition: [P] f32, 1 = off.
        presence: [P] f32, 0 = off.
        frequency: [P] f32, 0 = off.
    Mutates: the rows of `logits` named by `row_index`.
    """
    if not use_triton(logits):
        apply_penalties_ref(
            logits,
            row_index=row_index,
            request_index=request_index,
            prompt_mask=prompt_mask,
            output_counts=output_counts,
            path_token_ids=path_token_ids,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )
        return
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    assert prompt_mask.is_contiguous() and output_counts.is_contiguous()
    count, width = row_index.shape[0], logits.shape[1]
    if count == 0:
        return
    block = min(1024, triton.next_power_of_2(width))
    count_launch("penalties")
    _penalties_kernel[(count, triton.cdiv(width, block))](
        logits,
        row_index.contiguous(),
        request_index.contiguous(),
        prompt_mask,
        output_counts,
        path_token_ids.contiguous(),
        repetition.contiguous(),
        presence.contiguous(),
        frequency.contiguous(),
        width,
        path_token_ids.shape[1],
        BLOCK=block,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )


def apply_penalties_ref(
    logits: torch.Tensor,
    *,
    row_index: torch.Tensor,
    request_index: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    path_token_ids: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Do what `apply_penalties` does in plain torch."""
    selected = logits[row_index]  # [P, V]
    counts = output_counts[request_index].float()  # [P, V]
    on_path = (path_token_ids >= 0).float()
    counts.scatter_add_(1, path_token_ids.clamp(min=0), on_path)
    is_output = counts > 0
    is_seen = prompt_mask[request_index] | is_output
    factor = repetition.unsqueeze(1)
    repeated = torch.where(selected > 0, selected / factor, selected * factor)
    selected = torch.where(is_seen, repeated, selected)
    selected -= frequency.unsqueeze(1) * counts
    selected -= presence.unsqueeze(1) * is_output
    logits[row_index] = selected


def apply_min_new_tokens(
    logits: torch.Tensor, row_index: torch.Tensor, token_ids: torch.Tensor
) -> None:
    """Forbid tokens (EOS and stop ids) in rows whose output is too short to end.

    Args:
        logits: [R, V] f32.
        row_index: [M] i64.
        token_ids: [M] i64.
    Mutates: `logits`.
    """
    # Not by an assignment: torch would copy the value to the device, and wait for that.
    logits.index_put_((row_index, token_ids), logits.new_full((), -torch.inf))
