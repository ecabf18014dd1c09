"""A small Llama decoder whose parameter names are those of Hugging Face checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOutput:
    hidden: Tensor  # [B, T, hidden_size], after the final norm
    aux: tuple[Tensor, ...]  # outputs of the layers asked for, raw residual stream


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * scale).to(x.dtype)


def rope_table(config: LlamaConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of shape [*positions.shape, head_dim], halves repeated."""
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device).float()
    angles = positions.float()[..., None] * config.rope_theta ** (-exponent / config.head_dim)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last dimension; cos and sin broadcast against x."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(input_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q [B, num_heads, T, head_dim], rotated k and v [B, num_kv_heads, ...]."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend causally within the sequence."""
        q, k, v = self.project(x, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def decoder_layers(self) -> list[DecoderLayer]:
        """Return the layers, lowest first."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


class LlamaForCausalLM(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        init_weights(self, num_residual_writes=2 * config.num_layers)

    def forward(self, token_ids: Tensor, aux_layer_ids: tuple[int, ...] = ()) -> DecoderOutput:
        """Run whole sequences from position 0.

        Args:
            token_ids: [B, T] i64.
            aux_layer_ids: Layers whose outputs are returned, ascending.
        """
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        cos, sin = rope_table(self.config, positions)
        x = self.model.embed_tokens(token_ids)
        aux = []
        for layer_id, layer in enumerate(self.model.decoder_layers()):
            x = layer(x, cos, sin)
            if layer_id in aux_layer_ids:
                aux.append(x)
        return DecoderOutput(hidden=self.model.norm(x), aux=tuple(aux))

    def compile_layers(self) -> None:
        """Compile each layer alone: one compilation serves all of them."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)


def init_weights(module: nn.Module, *, num_residual_writes: int) -> None:
    """Draw matrices from N(0, 1 / inputs), smaller where they write to the residual stream.

    The embedding and the head start at 0.02: every token about equally likely.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2:
            continue
        std = parameter.shape[1] ** -0.5
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            std = 0.02
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(num_residual_writes)
        nn.init.normal_(parameter, std=std)


def count_parameters(module: nn.Module) -> int:
    """Return the number of trained and frozen parameters, buffers excluded."""
    return sum(parameter.numel() for parameter in module.parameters())
