"""Logit processors that run before sampling, in this order: bias, penalties, min_new_tokens mask.

Pure torch, vectorised over rows; a row is one tree node with its own path.
"""

from __future__ import annotations

import torch


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


def apply_penalties(
    logits: torch.Tensor,
    *,
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
        request_index: [R] i64. Row of the two tables.
        prompt_mask: [Q, V] bool. Tokens of the prompt.
        output_counts: [Q, V] i32. Occurrences among the committed output tokens.
        path_token_ids: [R, D] i64. Tokens on the row's path that are not in output_counts yet,
            padded with -1.
        repetition: [R] f32, 1 = off.
        presence: [R] f32, 0 = off.
        frequency: [R] f32, 0 = off.
    Mutates: `logits`.
    """
    counts = output_counts[request_index].float()  # [R, V]
    on_path = (path_token_ids >= 0).float()
    counts.scatter_add_(1, path_token_ids.clamp(min=0), on_path)
    is_output = counts > 0
    is_seen = prompt_mask[request_index] | is_output
    factor = repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits.copy_(torch.where(is_seen, repeated, logits))
    logits -= frequency.unsqueeze(1) * counts
    logits -= presence.unsqueeze(1) * is_output


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
    logits[row_index, token_ids] = -torch.inf
