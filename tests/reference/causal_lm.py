"""A causal language model that recomputes the whole sequence every time."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]
Config = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseOutput:
    """What a forward over tokens 0..T-1 gives.

    Args:
        layers: Output of every layer, the residual stream. [T, h] each.
        final: [T, h] after the final norm.
        logits: [T, V].
    """

    layers: list[torch.Tensor]
    final: torch.Tensor
    logits: torch.Tensor


class ReferenceLM:
    """Llama, Mistral, Qwen2, Qwen3 or the target part of MiMo, in float32."""

    def __init__(self, directory: Path) -> None:
        self.config = read_config(directory)
        self.weights = read_weights(directory)

    @property
    def embedding(self) -> torch.Tensor:
        """Return [V, h]."""
        return self.weights["model.embed_tokens.weight"]

    @property
    def head(self) -> torch.Tensor:
        """Return [V, h]."""
        if self.config["tie_word_embeddings"]:
            return self.embedding
        return self.weights["lm_head.weight"]

    def forward(self, token_ids: list[int]) -> DenseOutput:
        """Run tokens 0..T-1."""
        x = self.embedding[token_ids]
        layers = []
        for i in range(self.config["num_hidden_layers"]):
            x = decoder_layer(self.weights, f"model.layers.{i}", x, self.config)
            layers.append(x)
        final = rms_norm(x, self.weights["model.norm.weight"], self.config)
        return DenseOutput(layers=layers, final=final, logits=final @ self.head.T)

    def generate(self, token_ids: list[int], num_new: int) -> list[int]:
        """Return `num_new` greedy tokens, ties by the lower id."""
        output: list[int] = []
        for _ in range(num_new):
            output.append(int(self.forward(token_ids + output).logits[-1].argmax()))
        return output


def read_config(directory: Path) -> Config:
    """Return config.json."""
    return json.loads((directory / "config.json").read_text())


def read_weights(directory: Path) -> Weights:
    """Return all tensors; floating-point ones in float32."""
    weights: Weights = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights |= load_file(path)
    return {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }


def rms_norm(x: torch.Tensor, weight: torch.Tensor, config: Config) -> torch.Tensor:
    """Return x / rms(x) * weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight


def project(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer, with its bias if the checkpoint has one."""
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def frequencies(config: Config) -> list[float]:
    """Return the angle per position of every pair, scaled as config.json says."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", "default")
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    result = []
    for i in range(dim // 2):
        frequency = theta ** (-2 * i / dim)
        if kind == "linear":
            frequency /= rope["factor"]
        if kind == "llama3":
            original = rope["original_max_position_embeddings"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            wavelength = 2 * math.pi / frequency
            if wavelength > original / low:
                frequency /= rope["factor"]
            elif wavelength >= original / high:
                smooth = (original / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
        result.append(frequency)
    return result


def rotate(x: torch.Tensor, positions: list[int], config: Config) -> torch.Tensor:
    """Rotate the pairs (i, i + d/2) of [T, H, d]."""
    angles = torch.tensor(
        [[position * f for f in frequencies(config)] for position in positions],
        dtype=torch.float64,
    )
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]  # [T, 1, d / 2]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def attend(
    weights: Weights,
    prefix: str,
    x: torch.Tensor,
    config: Config,
    positions: list[int],
    window: int,
) -> torch.Tensor:
    """Attend causally within one sequence, projections included.

    Args:
        window: Row i sees rows i - window + 1 .. i; 0 = all before it.
    """
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    q, k, v = (
        project(weights, f"{prefix}.{name}_proj", x).unflatten(-1, (-1, dim)) for name in "qkv"
    )
    if f"{prefix}.q_norm.weight" in weights:
        q = rms_norm(q, weights[f"{prefix}.q_norm.weight"], config)
        k = rms_norm(k, weights[f"{prefix}.k_norm.weight"], config)
    q, k = rotate(q, positions, config), rotate(k, positions, config)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(dim)
    rows = torch.arange(len(x))
    distance = rows[:, None] - rows[None, :]
    is_hidden = (distance < 0) | ((distance >= window) if window else (distance < 0))
    weights_ = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
    out = torch.einsum("hij,jhd->ihd", weights_, v).flatten(1)
    return project(weights, f"{prefix}.o_proj", out)


def mlp(weights: Weights, prefix: str, x: torch.Tensor) -> torch.Tensor:
    """Return down(silu(gate(x)) * up(x))."""
    gate = torch.nn.functional.silu(project(weights, f"{prefix}.gate_proj", x))
    return project(weights, f"{prefix}.down_proj", gate * project(weights, f"{prefix}.up_proj", x))


def decoder_layer(
    weights: Weights,
    prefix: str,
    x: torch.Tensor,
    config: Config,
    *,
    positions: list[int] | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Run one layer over a whole sequence; an input norm that is not there is the identity.

    Args:
        window: None: the checkpoint's own sliding window.
    """
    if window is None:
        is_used = config.get("use_sliding_window", True)
        window = (config.get("sliding_window") or 0) if is_used else 0
    normed = x
    if f"{prefix}.input_layernorm.weight" in weights:
        normed = rms_norm(x, weights[f"{prefix}.input_layernorm.weight"], config)
    positions = list(range(len(x))) if positions is None else positions
    x = x + attend(weights, f"{prefix}.self_attn", normed, config, positions, window)
    normed = rms_norm(x, weights[f"{prefix}.post_attention_layernorm.weight"], config)
    return x + mlp(weights, f"{prefix}.mlp", normed)
