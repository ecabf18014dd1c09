"""Losses over large batches, written to be fused by torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from training.loop import autocast
from training.model import LlamaForCausalLM


def next_token_loss(lm_head: Tensor, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of hidden states [B, T, h] against token ids [B, T]."""
    logits = F.linear(hidden, lm_head).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def distillation_loss(logits: Tensor, teacher_probs: Tensor) -> Tensor:
    """Return the mean cross-entropy against teacher probabilities [B, T, V].

    Teacher rows may sum to less than one: mass outside a reduced vocabulary is not charged.
    """
    return -(teacher_probs * logits.float().log_softmax(-1)).sum(-1).mean()


def maybe_compile(function: Callable, device: torch.device) -> Callable:
    """Compile on a GPU; a CPU dry run stays eager."""
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, tokens: Tensor, *, max_tokens: int = 2_000_000) -> float:
    """Return the mean loss in nats per token over the first chunks of 1024 of a stream."""
    length, batch_size = 1024, 16
    chunks = tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1).long()
    total, count = 0.0, 0
    for chunk in chunks[: max(1, max_tokens // length)].split(batch_size):
        with autocast(tokens.device):
            hidden = model(chunk[:, :-1]).hidden
            loss = next_token_loss(model.lm_head.weight, hidden, chunk[:, 1:])
        total += loss.item() * len(chunk)
        count += len(chunk)
    return total / count
