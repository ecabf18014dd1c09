"""A small DeepSeek-V3: latent attention, experts, and its layer of multi-token prediction (MTP).

Parameter names are those of DeepseekV3ForCausalLM. Keys and values of all heads are made from the
latents; nothing is absorbed. The correction bias of a router follows the load of its experts and
no gradient.

Source: arXiv:2412.19437.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model import (
    MLP,
    DecoderLayer,
    LlamaConfig,
    LlamaForCausalLM,
    RMSNorm,
    apply_rope,
    init_weights,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(LlamaConfig):
    """What a Llama has not.

    Args:
        head_dim: Rotated values of a query and of the one key; qk_rope_head_dim in config.json.
        nope_dim: Values of a head's query and key that are not rotated.
        value_dim: Values of a head's value.
        query_rank, latent_rank: Width of what queries, and keys and values are made of.
        num_dense: First layers without experts.
    """

    nope_dim: int
    value_dim: int
    query_rank: int
    latent_rank: int
    num_experts: int
    num_experts_per_token: int
    expert_size: int
    num_dense: int = 1


class LatentAttention(nn.Module):
    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.num_heads
        self.q_a_proj = nn.Linear(hidden, config.query_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.query_rank, config.rms_norm_eps)
        query = heads * (config.nope_dim + config.head_dim)
        self.q_b_proj = nn.Linear(config.query_rank, query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            hidden, config.latent_rank + config.head_dim, bias=False
        )
        self.kv_a_layernorm = RMSNorm(config.latent_rank, config.rms_norm_eps)
        key_value = heads * (config.nope_dim + config.value_dim)
        self.kv_b_proj = nn.Linear(config.latent_rank, key_value, bias=False)
        self.o_proj = nn.Linear(heads * config.value_dim, hidden, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k [B, num_heads, T, nope_dim + head_dim], v [B, num_heads, T, value_dim]."""
        config = self.config
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rope = (
            q.unflatten(-1, (config.num_heads, -1))
            .transpose(1, 2)
            .split([config.nope_dim, config.head_dim], dim=-1)
        )
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(
            [config.latent_rank, config.head_dim], dim=-1
        )
        k_nope, v = (
            self.kv_b_proj(self.kv_a_layernorm(latent))
            .unflatten(-1, (config.num_heads, -1))
            .transpose(1, 2)
            .split([config.nope_dim, config.value_dim], dim=-1)
        )
        q_rope = apply_rope(halves_of_pairs(q_rope), cos, sin)
        k_rope = apply_rope(halves_of_pairs(k_rope), cos, sin)
        k_rope = k_rope[:, None].expand(-1, config.num_heads, -1, -1)
        return torch.cat([q_nope, q_rope], -1), torch.cat([k_nope, k_rope], -1), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend causally within the sequence."""
        q, k, v = self.project(x, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def halves_of_pairs(x: Tensor) -> Tensor:
    """Move the pairs (2i, 2i + 1), which rotate together, to (i, i + D / 2)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class Router(nn.Module):
    """Chooses experts by sigmoid and bias; weighs them without the bias."""

    e_score_correction_bias: Tensor
    load: Tensor  # [num_experts], rows since the bias was last moved

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_experts_per_token
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))
        self.register_buffer("load", torch.zeros(config.num_experts), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and weights of the chosen experts, [rows, num_experts_per_token] each.

        Mutates: load, while training.
        """
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        ids = (scores + self.e_score_correction_bias).topk(self.num_chosen, dim=-1).indices
        if self.training:
            self.load += torch.bincount(ids.flatten(), minlength=len(self.load))
        weights = scores.gather(-1, ids)
        return ids, weights / weights.sum(-1, keepdim=True)

    @torch.no_grad()
    def balance(self, *, step_size: float) -> None:
        """Move the bias towards the experts that had less than their share.

        Mutates: e_score_correction_bias, load.
        """
        self.e_score_correction_bias += step_size * (self.load.mean() - self.load).sign()
        self.load.zero_()


class Experts(nn.Module):
    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        expert = dataclasses.replace(config, intermediate_size=config.expert_size)
        self.gate = Router(config)
        self.experts = nn.ModuleList(MLP(expert) for _ in range(config.num_experts))
        self.shared_experts = MLP(expert)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)  # [B * T, hidden_size]
        ids, weights = self.gate(rows)
        out = self.shared_experts(rows).float()
        for index, expert in enumerate(self.experts):
            chosen, place = (ids == index).nonzero(as_tuple=True)
            part = expert(rows[chosen]).float() * weights[chosen, place, None]
            out = out.index_add(0, chosen, part)
        return out.to(x.dtype).view_as(x)


class DeepseekLayer(DecoderLayer):
    """A decoder layer, whose forward is a Llama's; with experts or without."""

    def __init__(self, config: DeepseekConfig, *, has_experts: bool) -> None:
        nn.Module.__init__(self)
        self.self_attn = LatentAttention(config)  # type: ignore[assignment]
        self.mlp = Experts(config) if has_experts else MLP(config)  # type: ignore[assignment]
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DeepseekForCausalLM(LlamaForCausalLM):
    """A LlamaForCausalLM of other layers."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(dataclasses.replace(config, num_layers=0))
        self.config: DeepseekConfig = config
        self.model.layers.extend(
            DeepseekLayer(config, has_experts=layer >= config.num_dense)
            for layer in range(config.num_layers)
        )
        init_weights(self, num_residual_writes=2 * config.num_layers)


class DeepseekMTPLayer(DeepseekLayer):
    """The layer at `model.layers.{num_layers}`."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config, has_experts=True)
        self.config = config
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(config.hidden_size, config.rms_norm_eps)})
        init_weights(self, num_residual_writes=2)

    def project(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the residual and q, k, v; see DraftLayer.project."""
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))
        return x, *self.self_attn.project(self.input_layernorm(x), cos, sin)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the recurrent hidden state; see DraftLayer.finish."""
        x = residual + self.self_attn.o_proj(attended)
        return self.shared_head["norm"](x + self.mlp(self.post_attention_layernorm(x)))


def balanced(
    losses: Iterator[Tensor], module: nn.Module, *, step_size: float = 0.002
) -> Iterator[Tensor]:
    """Yield the losses; after each step move the biases of the routers.

    Mutates: the routers of `module`.
    """
    routers = [each for each in module.modules() if isinstance(each, Router)]
    for loss in losses:
        yield loss
        for router in routers:
            router.balance(step_size=step_size)
