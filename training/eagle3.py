"""The EAGLE-3 head. Source: arXiv:2503.01840.

The head's row at position p takes the pair (token p + 1, target feature p) and predicts token
p + 2. Where no true feature exists yet, the row's recurrent hidden state stands in for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.model import MLP, Attention, LlamaConfig, RMSNorm, init_weights


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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the residual and q, k, v; see DraftLayer.project."""
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        return hidden, *self.self_attn.project(x, cos, sin)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the recurrent hidden state; see DraftLayer.finish."""
        hidden = residual + self.self_attn.o_proj(attended)
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
