"""DeepSeek-V3 over whole sequences: K and V of every head are made, experts are looked up one by
one; and its layers of multi-token prediction."""

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
)
from tests.reference.drafts import Row


class ReferenceDeepseek:
    """A DeepseekV3ForCausalLM of float32."""

    def __init__(self, directory: Path) -> None:
        self.config = read_config(directory)
        self.weights = read_weights(directory)
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights["lm_head.weight"]

    def forward(self, token_ids: list[int]) -> DenseOutput:
        """Run a whole sequence."""
        x, layers = self.embedding[token_ids], []
        positions = list(range(len(token_ids)))
        for layer in range(self.config["num_hidden_layers"]):
            x = layer_of(self.weights, f"model.layers.{layer}", x, self.config, positions)
            layers.append(x)
        final = rms_norm(x, self.weights["model.norm.weight"], self.config)
        return DenseOutput(layers=layers, final=final, logits=final @ self.head.T)


class ReferenceDeepseekMTP:
    """The layers behind the last one: arXiv:2412.19437, section 2.2."""

    def __init__(self, target: ReferenceDeepseek, window: int = 0) -> None:
        self.target = target
        self.window = window

    def true_rows(self, token_ids: list[int], target: DenseOutput) -> list[Row]:
        return [
            Row(token_id=token_ids[p + 1], position=p, recurrent=target.final[p])
            for p in range(len(token_ids) - 1)
        ]

    def hidden(self, rows: list[Row]) -> torch.Tensor:
        vectors = torch.stack([row.recurrent for row in rows if row.recurrent is not None])
        positions = [row.position for row in rows]
        return self.layer(0, [row.token_id for row in rows], positions, vectors)[-1]

    def layer(
        self, index: int, tokens: list[int], positions: list[int], vectors: torch.Tensor
    ) -> torch.Tensor:
        """Run all rows through one of the layers. [T, h]"""
        w, config = self.target.weights, self.target.config
        prefix = f"model.layers.{config['num_hidden_layers'] + index}"
        embeds = self.target.embedding[tokens]
        x = torch.cat(
            [
                rms_norm(embeds, w[f"{prefix}.enorm.weight"], config),
                rms_norm(vectors, w[f"{prefix}.hnorm.weight"], config),
            ],
            dim=-1,
        )
        x = project(w, f"{prefix}.eh_proj", x)
        x = layer_of(w, prefix, x, config, positions, self.window)
        return rms_norm(x, w[f"{prefix}.shared_head.norm.weight"], config)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.head @ hidden


def layer_of(
    weights: Weights,
    prefix: str,
    x: torch.Tensor,
    config: Config,
    positions: list[int],
    window: int = 0,
) -> torch.Tensor:
    """Run one layer over a whole sequence."""
    normed = rms_norm(x, weights[f"{prefix}.input_layernorm.weight"], config)
    x = x + attend_expanded(weights, f"{prefix}.self_attn", normed, config, positions, window)
    normed = rms_norm(x, weights[f"{prefix}.post_attention_layernorm.weight"], config)
    if f"{prefix}.mlp.gate.weight" in weights:
        return x + torch.stack([experts(weights, f"{prefix}.mlp", row, config) for row in normed])
    return x + mlp(weights, f"{prefix}.mlp", normed)


def attend_expanded(
    weights: Weights,
    prefix: str,
    x: torch.Tensor,
    config: Config,
    positions: list[int],
    window: int,
) -> torch.Tensor:
    """Attend causally with K and V that are made of the latents, projections included."""
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    rank, num_heads = config["kv_lora_rank"], config["num_attention_heads"]
    inner = config | {"rms_norm_eps": 1e-6}
    q = rms_norm(
        project(weights, f"{prefix}.q_a_proj", x), weights[f"{prefix}.q_a_layernorm.weight"], inner
    )
    q = project(weights, f"{prefix}.q_b_proj", q).unflatten(-1, (num_heads, nope + rope))
    latent, shared_key = project(weights, f"{prefix}.kv_a_proj_with_mqa", x).split([rank, rope], -1)
    latent = rms_norm(latent, weights[f"{prefix}.kv_a_layernorm.weight"], inner)
    kv = project(weights, f"{prefix}.kv_b_proj", latent).unflatten(-1, (num_heads, -1))
    shared_key = turn(shared_key[:, None], positions, config).expand(-1, num_heads, -1)
    k = torch.cat([kv[..., :nope], shared_key], dim=-1)
    q = torch.cat([q[..., :nope], turn(q[..., nope:], positions, config)], dim=-1)
    yarn = config["rope_parameters"]
    stretch = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1
    scores = torch.einsum("ihd,jhd->hij", q, k) * (stretch**2 / math.sqrt(nope + rope))
    rows = torch.arange(len(x))
    distance = rows[:, None] - rows[None, :]
    is_hidden = (distance < 0) | ((distance >= window) if window else (distance < 0))
    shares = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
    out = torch.einsum("hij,jhd->ihd", shares, kv[..., nope:]).flatten(1)
    return project(weights, f"{prefix}.o_proj", out)


def turn(x: torch.Tensor, positions: list[int], config: Config) -> torch.Tensor:
    """Rotate the pairs (2i, 2i + 1) of [T, H, d] by angles that yarn has stretched."""
    yarn, dim = config["rope_parameters"], x.shape[-1]
    theta, factor = yarn["rope_theta"], yarn["factor"]
    original = yarn["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), dim - 1)
    frequencies = []
    for pair in range(dim // 2):
        frequency = theta ** (-2 * pair / dim)
        share = min(max((pair - low) / max(high - low, 0.001), 0), 1)
        frequencies.append(frequency * (1 - share) + frequency / factor * share)
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor(
        frequencies, dtype=torch.float64
    )

    def scale(share: float) -> float:
        return 0.1 * share * math.log(factor) + 1

    turns = torch.polar(torch.ones_like(angles), angles)[:, None]  # [T, 1, d / 2]
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * turns).flatten(-2).float()
    return turned * (scale(yarn["mscale"]) / scale(yarn["mscale_all_dim"]))


def experts(weights: Weights, prefix: str, x: torch.Tensor, config: Config) -> torch.Tensor:
    """Return what the experts of one row add to it. [h]"""
    scores = (weights[f"{prefix}.gate.weight"] @ x).sigmoid()
    wanted = scores + weights[f"{prefix}.gate.e_score_correction_bias"]
    groups = wanted.unflatten(0, (config["n_group"], -1))
    best = groups.topk(2, dim=1).values.sum(1).topk(config["topk_group"]).indices
    is_open = torch.zeros(len(groups), dtype=torch.bool).index_fill(0, best, 1)
    wanted = groups.masked_fill(~is_open[:, None], float("-inf")).flatten()
    chosen = wanted.topk(config["num_experts_per_tok"]).indices
    shares = scores[chosen] / scores[chosen].sum() * config["routed_scaling_factor"]
    out = torch.zeros_like(x)
    if f"{prefix}.shared_experts.down_proj.weight" in weights:
        out = mlp(weights, f"{prefix}.shared_experts", x)
    for share, expert in zip(shares, chosen.tolist(), strict=True):
        out = out + share * mlp(weights, f"{prefix}.experts.{expert}", x)
    return out
