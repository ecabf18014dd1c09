"""Logit processors that run before sampling, in this order: bias, penalties, min_new_tokens mask.

All work in place, on the rows concerned; a row is one tree node with its own path. Grid of the
penalties: (num_rows, num_chunks).
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Rows with penalties.

    Args:
        rows: [P] i64, rows of the logits, each once.
        req_idx: [P] i64, rows of the tables of tokens.
        path_token_ids: [P, D] i64, tokens on the row's path that the tables do not count yet,
            padded with -1.
        repetition: [P] f32, 1 = off.
        presence, frequency: [P] f32, 0 = off.
    """

    rows: torch.Tensor
    req_idx: torch.Tensor
    path_token_ids: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


def apply_penalties(
    logits: torch.Tensor,
    penalties: Penalties,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """Penalise the tokens that a row has seen: repetition first, then frequency and presence.

    Repetition counts prompt, output and the row's own path; frequency and presence count output
    and own path.

    Args:
        logits: [R, V] f32.
        prompt_mask: [Q, V] bool. Tokens of the prompt.
        output_counts: [Q, V] i32. Occurrences among the committed output tokens.
    Mutates: `penalties.rows` of `logits`.
    """
    if not use_triton(logits):
        apply_penalties_ref(logits, penalties, prompt_mask, output_counts)
        return
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    assert prompt_mask.is_contiguous() and output_counts.is_contiguous()
    count, width = len(penalties.rows), logits.shape[1]
    if count == 0:
        return
    block = min(1024, triton.next_power_of_2(width))
    count_launch("penalties")
    _penalties_kernel[(count, triton.cdiv(width, block))](
        logits,
        penalties.rows.contiguous(),
        penalties.req_idx.contiguous(),
        prompt_mask,
        output_counts,
        penalties.path_token_ids.contiguous(),
        penalties.repetition.contiguous(),
        penalties.presence.contiguous(),
        penalties.frequency.contiguous(),
        width,
        penalties.path_token_ids.shape[1],
        BLOCK=block,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )


def apply_penalties_ref(
    logits: torch.Tensor,
    penalties: Penalties,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """Do what `apply_penalties` does in plain torch."""
    selected = logits[penalties.rows]  # [P, V]
    counts = output_counts[penalties.req_idx].float()  # [P, V]
    on_path = (penalties.path_token_ids >= 0).float()
    counts.scatter_add_(1, penalties.path_token_ids.clamp(min=0), on_path)
    is_output = counts > 0
    is_seen = prompt_mask[penalties.req_idx] | is_output
    factor = penalties.repetition.unsqueeze(1)
    repeated = torch.where(selected > 0, selected / factor, selected * factor)
    selected = torch.where(is_seen, repeated, selected)
    selected -= penalties.frequency.unsqueeze(1) * counts
    selected -= penalties.presence.unsqueeze(1) * is_output
    logits[penalties.rows] = selected


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
