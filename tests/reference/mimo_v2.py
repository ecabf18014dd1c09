"""MiMo-V2 over whole sequences, by the fields of published files, and its layers of multi-token
prediction."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from tests.reference.causal_lm import (
    Config,
    DenseOutput,
    Weights,
    mlp,
    project,
    read_config,
    read_weights,
    rms_norm,
    rotate,
)
from tests.reference.deepseek import ReferenceDeepseekMTP, experts


class ReferenceMiMoV2:
    """A MiMoV2FlashForCausalLM of float32."""

    def __init__(self, directory: Path) -> None:
        config = read_config(directory)
        factor = config["routed_scaling_factor"] or 1.0
        self.config = config | {"rms_norm_eps": config["layernorm_epsilon"]}
        self.config["routed_scaling_factor"] = factor
        self.weights = read_weights(directory)
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights["lm_head.weight"]

    def forward(self, token_ids: list[int]) -> DenseOutput:
        """Run a whole sequence."""
        w, config = self.weights, self.config
        x, layers = self.embedding[token_ids], []
        positions = list(range(len(token_ids)))
        for index in range(config["num_hidden_layers"]):
            prefix, has_window = (
                f"model.layers.{index}",
                bool(config["hybrid_layer_pattern"][index]),
            )
            normed = rms_norm(x, w[f"{prefix}.input_layernorm.weight"], config)
            x = x + attend_narrow(
                w, f"{prefix}.self_attn", normed, config, positions, has_window=has_window
            )
            normed = rms_norm(x, w[f"{prefix}.post_attention_layernorm.weight"], config)
            if config["moe_layer_freq"][index]:
                x = x + torch.stack([experts(w, f"{prefix}.mlp", row, config) for row in normed])
            else:
                x = x + mlp(w, f"{prefix}.mlp", normed)
            layers.append(x)
        final = rms_norm(x, w["model.norm.weight"], config)
        return DenseOutput(layers=layers, final=final, logits=final @ self.head.T)


class ReferenceMiMoV2MTP(ReferenceDeepseekMTP):
    """`model.mtp.layers`: SGLang's mimo_v2_flash_nextn.py, vLLM's mimo_v2_mtp.py."""

    target: ReferenceMiMoV2

    def layer(
        self, index: int, tokens: list[int], positions: list[int], vectors: torch.Tensor
    ) -> torch.Tensor:
        """Run all rows through one of the layers. [T, h]"""
        w, config, prefix = self.target.weights, self.target.config, f"model.mtp.layers.{index}"

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return rms_norm(x, w[f"{prefix}.{name}.weight"], config)

        embeds = self.target.embedding[tokens]
        x = torch.cat([norm(embeds, "enorm"), norm(vectors, "hnorm")], dim=-1)
        x = project(w, f"{prefix}.eh_proj", x)
        normed = norm(x, "input_layernorm")
        x = x + attend_narrow(
            w, f"{prefix}.self_attn", normed, config, positions, has_window=True, limit=self.window
        )
        x = x + mlp(w, f"{prefix}.mlp", norm(x, "pre_mlp_layernorm"))
        return norm(x, "final_layernorm")


def attend_narrow(
    weights: Weights,
    prefix: str,
    x: torch.Tensor,
    config: Config,
    positions: list[int],
    *,
    has_window: bool,
    limit: int = 0,
) -> torch.Tensor:
    """Attend causally within one sequence, projections included.

    Args:
        limit: Rows that a row sees at most, itself included; 0: only the layer's window counts.
    """
    kind = "swa_" if has_window else ""
    dim, v_dim = config[f"{kind}head_dim"], config[f"{kind}v_head_dim"]
    q, k, v = (
        project(weights, f"{prefix}.{name}_proj", x).unflatten(-1, (-1, width))
        for name, width in (("q", dim), ("k", dim), ("v", v_dim))
    )
    v = v * config["attention_value_scale"]
    turned = int(dim * config["partial_rotary_factor"])
    rope = {"head_dim": turned, "rope_theta": config["swa_rope_theta" if kind else "rope_theta"]}
    q, k = (
        torch.cat([rotate(each[..., :turned], positions, rope), each[..., turned:]], dim=-1)
        for each in (q, k)
    )
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(dim)
    window = config["sliding_window_size"] + 1 if has_window else len(x)
    window = min(window, limit or window)
    rows = torch.arange(len(x))
    distance = rows[:, None] - rows[None, :]
    scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
    if f"{prefix}.attention_sink_bias" in weights:
        sinks = weights[f"{prefix}.attention_sink_bias"][:, None, None].expand(-1, len(x), 1)
        scores = torch.cat([scores, sinks], dim=-1)
    shares = scores.softmax(-1)[..., : len(x)]
    out = torch.einsum("hij,jhd->ihd", shares, v).flatten(1)
    return project(weights, f"{prefix}.o_proj", out)
