"""Write a checkpoint of random weights, at about the speed at which files are written.

For sizes that no download is at hand for: config.json, names, shapes and FP8 blocks are those of
the published model, and so are loading, memory and speed, of a target and of its layer of MTP.

    python -m benchmarks.random_checkpoint --model glm-4.5-air --out /dev/shm/glm
    coppice up --target-model /dev/shm/glm --draft-model /dev/shm/glm --algorithm mtp

Matrices keep the size of what they multiply, but what layers add to the residual stream is small
(`_TARGET_NOISE`), and the layer of MTP begins with the embedding, unchanged. So both compute about
the logits of a token's embedding, and the layer guesses most of the target's tokens, as trained
ones do; how many says nothing about the published model. The output layer is large (`_LOGIT_STD`),
so that the likeliest token has most of the probability.

Values are pieces of one long list of normal ones, from a place on that the name of a tensor and the
seed say: FP8 is written from there without being copied. Every block has a scale of its own.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import zlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.inflate import write_checkpoint
from benchmarks.inflation import Checkpoint, Recipe
from shared.kernels.quantized import SCALE_BLOCK
from shared.models.checkpoint_names import resolve_model

WEIGHTS = ("fp8", "bf16")
FP8 = torch.float8_e4m3fn
# What all layers together add to an embedding, per unit of it, roughly.
_TARGET_NOISE = 0.15
# The same of the hidden state that the layer of MTP reads beside the embedding.
_MTP_NOISE = 0.05
_LOGIT_STD = 12.0
_BIAS_STD = 0.05
_EOS_ID = 0  # of the bundled tokenizer
_FP8_STD = 32.0  # the largest of the values are far from 448
NUM_VALUES = (1 << 24) - 3  # a prime: rows of a matrix never start at the same one


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmShape:
    """Sizes of a Glm4MoeForCausalLM without norms of q and k, and with one layer of MTP.

    Args:
        num_layers: Of the target; the first one has no experts.
        intermediate_size: Width of the first layer's feed-forward.
        expert_width: Of each routed expert, and of the one that every token passes.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    expert_width: int
    max_position_embeddings: int


MODELS = {
    "glm-4.5-air": GlmShape(
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=10944,
        num_layers=46,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        expert_width=1408,
        max_position_embeddings=131072,
    ),
    # Of the last blocks of 128 some are not whole, and the bundled tokenizer has fewer tokens.
    "small-glm": GlmShape(
        vocab_size=4608,
        hidden_size=256,
        intermediate_size=320,
        num_layers=3,
        num_heads=12,
        num_kv_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        expert_width=160,
        max_position_embeddings=4096,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTensor(Recipe):
    """A tensor of normal values; without an `std` all `constant`, in float32 half of it to one and
    a half.

    Args:
        std: In FP8 always _FP8_STD: values are scaled by another tensor.
        seed: Of the whole checkpoint.
        source: The tensor that it is a copy of; "": none.
    """

    seed: int
    source: str = ""

    def make(self, name: str, device: torch.device) -> torch.Tensor:
        """Return the tensor; one in FP8 may be a view of values that others have, too."""
        key = f"{self.seed}/{self.source or name}"
        if self.dtype is torch.bfloat16:
            return Recipe.make(self, key, device)  # `super()` knows no class with slots
        start = zlib.crc32(key.encode())
        if self.dtype is FP8:
            return _values_at(start, math.prod(self.shape)).view(self.shape).to(device)
        generator = torch.Generator().manual_seed(start)
        if self.std:
            values = self.std * torch.randn(self.shape, generator=generator)
        else:
            values = self.constant * (0.5 + torch.rand(self.shape, generator=generator))
        return values.to(device)


class _Glm:
    """The tensors of one checkpoint.

    Args:
        weights: One of WEIGHTS.
    """

    def __init__(self, shape: GlmShape, weights: str, seed: int) -> None:
        self._shape = shape
        self._is_fp8 = weights == "fp8"
        self._seed = seed
        self._branch_scale = _TARGET_NOISE / math.sqrt(shape.num_layers)
        self.tensors: dict[str, RandomTensor] = {}
        self._add_outer()
        for layer in range(shape.num_layers):
            self._add_layer(f"model.layers.{layer}", has_experts=layer > 0)
        self._add_mtp(f"model.layers.{shape.num_layers}")

    def _add(self, name: str, *shape: int, **recipe: Any) -> None:
        self.tensors[name] = RandomTensor(shape=shape, seed=self._seed, **recipe)

    def _add_norms(self, prefix: str, *names: str) -> None:
        for name in names:
            self._add(f"{prefix}.{name}.weight", self._shape.hidden_size, constant=1.0)

    def _add_projection(self, name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        """Add a matrix that multiplies the size of a vector by `scale`, and its scales if FP8."""
        std = scale / math.sqrt(columns)
        if not self._is_fp8:
            self._add(f"{name}.weight", rows, columns, std=std)
            return
        self._add(f"{name}.weight", rows, columns, dtype=FP8, std=_FP8_STD)
        blocks = [-(-width // SCALE_BLOCK) for width in (rows, columns)]
        self._add(f"{name}.weight_scale_inv", *blocks, dtype=torch.float32, constant=std / _FP8_STD)

    def _add_outer(self) -> None:
        size = (self._shape.vocab_size, self._shape.hidden_size)
        self._add("model.embed_tokens.weight", *size, std=1.0)
        self._add_norms("model", "norm")
        # Negative: should a row be one of the embedding's, that token would follow itself for ever.
        # No output ends by itself.
        no_end = ((slice(_EOS_ID, _EOS_ID + 1),), torch.tensor(0.0))
        std = -_LOGIT_STD / math.sqrt(self._shape.hidden_size)
        self._add("lm_head.weight", *size, std=std, blocks=(no_end,))

    def _add_layer(self, prefix: str, *, has_experts: bool) -> None:
        shape, attention = self._shape, f"{prefix}.self_attn"
        q_width, kv_width = (
            heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads)
        )
        for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            self._add_projection(f"{attention}.{name}_proj", width, shape.hidden_size)
            self._add(f"{attention}.{name}_proj.bias", width, std=_BIAS_STD)
        self._add_projection(f"{attention}.o_proj", shape.hidden_size, q_width, self._branch_scale)
        self._add_norms(prefix, "input_layernorm", "post_attention_layernorm")
        if not has_experts:
            self._add_feed_forward(f"{prefix}.mlp", shape.intermediate_size)
            return
        router, num_experts = f"{prefix}.mlp.gate", shape.num_experts
        std = shape.hidden_size**-0.5
        self._add(f"{router}.weight", num_experts, shape.hidden_size, std=std)
        self._add(
            f"{router}.e_score_correction_bias", num_experts, dtype=torch.float32, std=_BIAS_STD
        )
        for expert in range(num_experts):
            self._add_feed_forward(f"{prefix}.mlp.experts.{expert}", shape.expert_width)
        self._add_feed_forward(f"{prefix}.mlp.shared_experts", shape.expert_width)

    def _add_feed_forward(self, prefix: str, width: int) -> None:
        hidden = self._shape.hidden_size
        for name in ("gate_proj", "up_proj"):
            self._add_projection(f"{prefix}.{name}", width, hidden)
        self._add_projection(f"{prefix}.down_proj", hidden, width, self._branch_scale)

    def _add_mtp(self, prefix: str) -> None:
        hidden = self._shape.hidden_size
        self._add_layer(prefix, has_experts=True)
        self._add_norms(prefix, "enorm", "hnorm", "shared_head.norm")
        embedding = ((slice(None), slice(hidden)), torch.eye(hidden, dtype=torch.bfloat16))
        std = _MTP_NOISE / math.sqrt(hidden)
        self._add(f"{prefix}.eh_proj.weight", hidden, 2 * hidden, std=std, blocks=(embedding,))
        for name, source in (
            ("embed_tokens", "model.embed_tokens"),
            ("shared_head.head", "lm_head"),
        ):
            copied = replace(self.tensors[f"{source}.weight"], source=f"{source}.weight")
            self.tensors[f"{prefix}.{name}.weight"] = copied


def random_checkpoint(shape: GlmShape, *, weights: str = "fp8", seed: int = 0) -> Checkpoint:
    """Return a GLM of random weights, with the bundled tokenizer.

    Args:
        weights: One of WEIGHTS.
    """
    return Checkpoint(
        base=resolve_model("demo", "target"),
        fields=_fields(shape, weights),
        recipes=_Glm(shape, weights, seed).tensors,
    )


def num_parameters(checkpoint: Checkpoint) -> int:
    """Return how many weights there are, scales not counted, copies as often as they are there."""
    return sum(
        math.prod(recipe.shape)
        for name, recipe in checkpoint.recipes.items()
        if not name.endswith("_scale_inv")
    )


def _fields(shape: GlmShape, weights: str) -> dict[str, Any]:
    """Return config.json, as it is published but for the tokens that end an output."""
    fields: dict[str, Any] = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": _EOS_ID,
        "first_k_dense_replace": 1,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "moe_intermediate_size": shape.expert_width,
        "n_group": 1,
        "n_routed_experts": shape.num_experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_heads,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_qk_norm": False,
        "vocab_size": shape.vocab_size,
    }
    if weights == "fp8":
        fields["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
        }
    return fields


@cache
def _values() -> torch.Tensor:
    """Return normal values in FP8, no NaN among them. [NUM_VALUES]."""
    generator = torch.Generator().manual_seed(0)
    return (_FP8_STD * torch.randn(NUM_VALUES, generator=generator)).clamp_(-448, 448).to(FP8)


def _values_at(start: int, count: int) -> torch.Tensor:
    """Return `count` values from `start` on, round and round. [count] FP8."""
    values = _values().view(torch.uint8)
    start %= len(values)
    parts = []
    while count:
        parts.append(values[start : start + count])
        count -= len(parts[-1])
        start = 0
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(FP8)


def main() -> None:
    """Write the checkpoint that the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.add_argument("--model", choices=MODELS, default="glm-4.5-air")
    parser.add_argument("--weights", choices=WEIGHTS, default="fp8")
    parser.add_argument("--layers", type=int, default=0, help="only so many, at least 2; 0 = all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.layers and args.layers < 2:
        parser.error("--layers must be at least 2: the first layer has no experts")
    started = time.perf_counter()
    shape = MODELS[args.model]
    shape = replace(shape, num_layers=args.layers or shape.num_layers)
    checkpoint = random_checkpoint(shape, weights=args.weights, seed=args.seed)
    # Before threads want them, each for itself.
    _values()
    Recipe(shape=(1,), std=1.0).make("", torch.device("cpu"))
    torch.set_num_threads(1)  # in each of those that write shards
    begun = time.perf_counter()
    num_bytes = write_checkpoint(checkpoint, args.out)
    now = time.perf_counter()
    sys.stdout.write(
        f"{args.out}: {num_parameters(checkpoint) / 1e9:.2f} billion weights, "
        f"{num_bytes / 1e9:.2f} GB, {num_bytes / 1e9 / (now - begun):.2f} GB/s, "
        f"{now - started:.0f} s\n"
    )


if __name__ == "__main__":
    main()
