"""Training-time test: a head drafts several tokens from every position of a text at once.

A head's row at position p takes the pair (token p + 1, target feature p) and predicts token p + 2.
Where no true feature exists yet, the row's recurrent hidden state stands in for it.

Source: arXiv:2503.01840.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from training.model import LlamaConfig, rope_table

DIAGONAL_SLOTS = 8  # keys of earlier steps per row, padded so that shapes do not change


class DraftLayer(Protocol):
    """The one attention layer of a head, and what surrounds it."""

    def project(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Read rows.

        Args:
            embeds, hidden: [B, T, hidden_size]; of token p + 1, and the feature of position p or
                the recurrent hidden state that stands in for it.
        Returns: the residual [B, T, hidden_size]; q, k, v [B, heads, T, D].
        """
        ...

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the recurrent hidden state from attention's output [B, T, heads * D]."""
        ...


def attend_with_diagonals(
    q: Tensor, k0: Tensor, v0: Tensor, step_k: list[Tensor], step_v: list[Tensor]
) -> Tensor:
    """Attend to true rows up to the row's base, and to the row's own earlier steps.

    Row r of step j drafts from base r: it sees rows 0..r of step 0 (true features) and row r of
    steps 1..j (its own guesses).

    Args:
        q: [B, num_heads, R, D] of step j.
        k0, v0: [B, num_kv_heads, R, D] of step 0; values may be of another width than keys.
        step_k, step_v: j tensors of the same shape, one for each of steps 1..j.
    Returns: [B, R, num_heads * width of a value].
    """
    b, num_heads, r, d = q.shape
    num_kv_heads = k0.shape[1]
    q = q.view(b, num_kv_heads, num_heads // num_kv_heads, r, d) * d**-0.5
    scores = q.flatten(2, 3) @ k0.transpose(-1, -2)
    scores = scores.view(*q.shape[:4], r)
    future = torch.ones(r, r, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill_(future, float("-inf"))
    diagonal = q.new_full((*q.shape[:4], DIAGONAL_SLOTS - len(step_k)), float("-inf"))
    diagonals = [(q * k[:, :, None]).sum(-1, keepdim=True).to(q.dtype) for k in step_k]
    scores = torch.cat([scores, *diagonals, diagonal], dim=-1)
    with torch.autocast(q.device.type, enabled=False):  # it would write the weights as float32
        weights = scores.softmax(-1)
    out = (weights[..., :r].flatten(2, 3) @ v0).view(*q.shape[:4], v0.shape[-1])
    for i, v in enumerate(step_v):
        out = out + weights[..., r + i, None] * v[:, :, None]
    return out.flatten(1, 2).transpose(1, 2).flatten(2)


def drafted_hidden_states(
    layer: DraftLayer, config: LlamaConfig, embeds: Tensor, hidden: Tensor, *, num_steps: int
) -> list[Tensor]:
    """Draft `num_steps` tokens from every position at once.

    Args:
        embeds: [B, R + num_steps - 1 or more, hidden_size]; entry p embeds token p + 1.
        hidden: [B, R, hidden_size]; entry p is the target's feature at position p, projected.
    Returns: num_steps tensors [B, R, hidden_size]; row r of step j predicts token r + j + 2.
    """
    num_rows = hidden.shape[1]
    step_k: list[Tensor] = []
    step_v: list[Tensor] = []
    outputs = []
    for j in range(num_steps):
        positions = torch.arange(j, j + num_rows, device=hidden.device)
        cos, sin = rope_table(config, positions)
        residual, q, k, v = layer.project(embeds[:, j : j + num_rows], hidden, cos, sin)
        step_k.append(k)
        step_v.append(v)
        attended = attend_with_diagonals(q, step_k[0], step_v[0], step_k[1:], step_v[1:])
        hidden = layer.finish(residual, attended)
        outputs.append(hidden)
    return outputs
