"""The EAGLE-3 head and its training-time test. Source: arXiv:2503.01840.

The head's row at position p takes the pair (token p + 1, target feature p) and predicts token
p + 2. Where no true feature exists yet, the row's recurrent hidden state stands in for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.model import MLP, Attention, LlamaConfig, RMSNorm, init_weights, rope_table

DIAGONAL_SLOTS = 8  # keys of earlier steps per row, padded so that shapes do not change


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    decoder: LlamaConfig  # num_layers is 1; hidden_size is the target's
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]  # target layers whose outputs are the features


class Eagle3Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.mlp = MLP(config)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def project(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v of rows with these embeddings and hidden states, [B, heads, T, D]."""
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        return self.self_attn.project(x, cos, sin)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the recurrent hidden state from attention's output [B, T, heads * D]."""
        hidden = hidden + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    d2t: Tensor  # [draft_vocab_size] i64: target id = draft id + d2t[draft id]
    t2d: Tensor  # [vocab_size] bool: is a target id in the draft vocabulary

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        decoder = config.decoder
        num_aux = len(config.aux_layer_ids)
        self.fc = nn.Linear(num_aux * decoder.hidden_size, decoder.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(decoder)
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.lm_head = nn.Linear(decoder.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(decoder.vocab_size, dtype=torch.bool))
        init_weights(self, num_residual_writes=2)

    @property
    def hot_token_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, ascending. [draft_vocab_size] i64."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_hot_tokens(self, token_ids: Tensor) -> None:
        """Choose the draft vocabulary.

        Args:
            token_ids: [draft_vocab_size] i64, distinct target ids.
        Mutates: d2t, t2d.
        """
        token_ids = token_ids.sort().values
        self.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))
        self.t2d.zero_()
        self.t2d[token_ids] = True

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the draft vocabulary from recurrent hidden states."""
        return self.lm_head(self.norm(hidden))


def attend_with_diagonals(
    q: Tensor, k0: Tensor, v0: Tensor, step_k: list[Tensor], step_v: list[Tensor]
) -> Tensor:
    """Attend to true rows up to the row's base, and to the row's own earlier steps.

    Row r of step j drafts from base r: it sees rows 0..r of step 0 (true features) and row r of
    steps 1..j (its own guesses).

    Args:
        q: [B, num_heads, R, D] of step j.
        k0, v0: [B, num_kv_heads, R, D] of step 0.
        step_k, step_v: j tensors of the same shape, one for each of steps 1..j.
    Returns: [B, R, num_heads * D].
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
    out = (weights[..., :r].flatten(2, 3) @ v0).view(q.shape)
    for i, v in enumerate(step_v):
        out = out + weights[..., r + i, None] * v[:, :, None]
    return out.flatten(1, 2).transpose(1, 2).flatten(2)


def drafted_hidden_states(
    head: Eagle3Head, embeds: Tensor, features: Tensor, *, num_steps: int
) -> list[Tensor]:
    """Run the training-time test: draft `num_steps` tokens from every position at once.

    Args:
        embeds: [B, R + num_steps - 1 or more, hidden_size]; entry p embeds token p + 1.
        features: [B, R, num_aux * hidden_size]; entry p is the target's feature at position p.
    Returns: num_steps tensors [B, R, hidden_size]; row r of step j predicts token r + j + 2.
    """
    num_rows = features.shape[1]
    hidden = head.fc(features)
    step_k: list[Tensor] = []
    step_v: list[Tensor] = []
    outputs = []
    for j in range(num_steps):
        positions = torch.arange(j, j + num_rows, device=features.device)
        cos, sin = rope_table(head.config.decoder, positions)
        q, k, v = head.midlayer.project(embeds[:, j : j + num_rows], hidden, cos, sin)
        step_k.append(k)
        step_v.append(v)
        attended = attend_with_diagonals(q, step_k[0], step_v[0], step_k[1:], step_v[1:])
        hidden = head.midlayer.finish(hidden, attended)
        outputs.append(hidden)
    return outputs
