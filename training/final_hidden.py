"""The EAGLE-1/2 head and the MiMo-style layer of multi-token prediction.

Both read the target's final hidden states (after its last norm), predict the next ones, and speak
through the target's head. Parameter names are those of the checkpoints.

Source: arXiv:2401.15077, arXiv:2505.07608.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training.model import (
    MLP,
    Attention,
    DecoderLayer,
    LlamaConfig,
    LlamaForCausalLM,
    RMSNorm,
    init_weights,
)


class EagleLayer(nn.Module):
    """A decoder layer without an input norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class EagleHead(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([EagleLayer(config)])
        init_weights(self, num_residual_writes=2)
        nn.init.zeros_(self.fc.bias)

    @property
    def layer(self) -> EagleLayer:
        """The only layer."""
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    @torch.no_grad()
    def balance_inputs(self, target: LlamaForCausalLM) -> None:
        """Let embedding and feature start with equal say: no norm evens out their sizes.

        Mutates: fc.weight.
        """
        width = self.config.hidden_size
        for columns, values in (
            (self.fc.weight[:, :width], target.model.embed_tokens.weight),
            (self.fc.weight[:, width:], target.model.norm.weight),
        ):
            columns /= values.square().mean().sqrt()

    def project(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the residual and q, k, v; see DraftLayer.project."""
        x = self.fc(torch.cat([embeds, hidden], dim=-1))
        return x, *self.layer.self_attn.project(x, cos, sin)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the recurrent hidden state; see DraftLayer.finish."""
        x = residual + self.layer.self_attn.o_proj(attended)
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x))


class MTPLayer(DecoderLayer):
    """The layer at `model.mtp_layers.0`; its embedding of position 0's row is zero."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.config = config
        self.token_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.final_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        init_weights(self, num_residual_writes=2)

    def project(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the residual and q, k, v; see DraftLayer.project."""
        x = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embeds)], dim=-1)
        x = self.input_proj(x)
        return x, *self.self_attn.project(self.input_layernorm(x), cos, sin)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the recurrent hidden state; see DraftLayer.finish."""
        x = residual + self.self_attn.o_proj(attended)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.final_layernorm(x)
