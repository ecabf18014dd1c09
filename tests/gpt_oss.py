"""A tiny gpt-oss: sinks, windows in every other layer, experts with biases, dense or in MXFP4."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.checkpoints import EOS_ID, LOGIT_SCALE, VOCAB_SIZE, Tensors, write_tokenizer

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16
NUM_EXPERTS, WIDTH = 6, 32
_BLOCK = 32
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def write_gpt_oss(
    directory: Path,
    *,
    seed: int = 0,
    hidden_size: int = 96,
    num_layers: int = 3,
    window: int = 20,
    is_mxfp4: bool = False,
) -> Path:
    """Write a GptOssForCausalLM as its publisher does.

    Args:
        window: Of every other layer, from the first one on.
        is_mxfp4: Experts are blocks and scales.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(size, generator=generator)

    def linear(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = normal(rows, columns, scale=1 / math.sqrt(columns))
        tensors[f"{name}.bias"] = normal(rows, scale=0.3)

    def experts(name: str, rows: int, columns: int) -> None:
        weight = normal(NUM_EXPERTS, rows, columns, scale=1 / math.sqrt(columns))
        tensors[f"{name}_bias"] = normal(NUM_EXPERTS, rows, scale=0.3)
        if is_mxfp4:
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = to_mxfp4(weight)
        else:
            tensors[name] = weight.transpose(1, 2).contiguous()

    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = 1 + normal(hidden_size, scale=0.2)
        for name, count in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
            linear(f"{prefix}.self_attn.{name}_proj", count * HEAD_DIM, hidden_size)
        linear(f"{prefix}.self_attn.o_proj", hidden_size, NUM_HEADS * HEAD_DIM)
        tensors[f"{prefix}.self_attn.sinks"] = 1 + normal(NUM_HEADS)
        linear(f"{prefix}.mlp.router", NUM_EXPERTS, hidden_size)
        experts(f"{prefix}.mlp.experts.gate_up_proj", 2 * WIDTH, hidden_size)
        experts(f"{prefix}.mlp.experts.down_proj", hidden_size, WIDTH)
    tensors["model.embed_tokens.weight"] = normal(VOCAB_SIZE, hidden_size)
    tensors["model.norm.weight"] = 1 + normal(hidden_size, scale=0.2)
    tensors["lm_head.weight"] = normal(
        VOCAB_SIZE, hidden_size, scale=LOGIT_SCALE / math.sqrt(hidden_size)
    )
    kinds = ("sliding_attention", "full_attention")
    fields = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": WIDTH,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": True,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20000.0,
        "rope_scaling": YARN,
        "sliding_window": window,
        "layer_types": [kinds[layer % 2] for layer in range(num_layers)],
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 3,
        "experts_per_token": 3,
        "swiglu_limit": 0.7,
        "tie_word_embeddings": False,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }
    if is_mxfp4:
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
        fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields, indent=2))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return write_tokenizer(directory)


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks and scales whose values are the nearest ones.

    Args:
        weight: [..., K].
    Returns: blocks [..., K / 32, 16] u8, scales [..., K / 32] u8.
    """
    blocks = weight.unflatten(-1, (-1, _BLOCK))
    exponents = blocks.abs().amax(dim=-1).log2().floor() - 2
    scaled = blocks / exponents.exp2()[..., None]
    indices = (scaled.abs()[..., None] - _MAGNITUDES).abs().argmin(dim=-1)
    nibbles = (indices + 8 * (scaled < 0)).to(torch.uint8)
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4), (exponents + 127).to(torch.uint8)
