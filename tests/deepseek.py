"""A tiny DeepSeek-V3: latent attention, experts, a layer of multi-token prediction (MTP)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.checkpoints import EOS_ID, LOGIT_SCALE, VOCAB_SIZE, Tensors, write_tokenizer

HIDDEN, NUM_LAYERS, NUM_HEADS, NUM_EXPERTS = 48, 2, 4, 4
NOPE, ROPE, VALUE, RANK, QUERY_RANK, WIDTH = 16, 8, 12, 16, 24, 24
YARN = {
    "rope_type": "yarn",
    "rope_theta": 20000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


def write_deepseek(
    directory: Path,
    *,
    seed: int = 0,
    num_layers: int = NUM_LAYERS,
    num_dense: int = 1,
    branch_scale: float = 1.0,
    num_mtp_layers: int = 1,
) -> Path:
    """Write a DeepseekV3ForCausalLM, and its layers of MTP.

    Args:
        num_dense: First layers without experts.
        branch_scale: Small values make the layer agree with the target.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        values = torch.randn((rows, columns), generator=generator)
        tensors[f"{name}.weight"] = values * scale / math.sqrt(columns)

    def norm(name: str, width: int) -> None:
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(width, generator=generator)

    def mlp(prefix: str, width: int, scale: float) -> None:
        for name in ("gate_proj", "up_proj"):
            matrix(f"{prefix}.{name}", width, HIDDEN)
        matrix(f"{prefix}.down_proj", HIDDEN, width, scale)

    def layer(prefix: str, *, has_experts: bool, scale: float = 1.0) -> None:
        attention = f"{prefix}.self_attn"
        matrix(f"{attention}.q_a_proj", QUERY_RANK, HIDDEN)
        norm(f"{attention}.q_a_layernorm", QUERY_RANK)
        matrix(f"{attention}.q_b_proj", NUM_HEADS * (NOPE + ROPE), QUERY_RANK)
        matrix(f"{attention}.kv_a_proj_with_mqa", RANK + ROPE, HIDDEN)
        norm(f"{attention}.kv_a_layernorm", RANK)
        matrix(f"{attention}.kv_b_proj", NUM_HEADS * (NOPE + VALUE), RANK)
        matrix(f"{attention}.o_proj", HIDDEN, NUM_HEADS * VALUE, scale)
        norm(f"{prefix}.input_layernorm", HIDDEN)
        norm(f"{prefix}.post_attention_layernorm", HIDDEN)
        if not has_experts:
            mlp(f"{prefix}.mlp", 80, scale)
            return
        matrix(f"{prefix}.mlp.gate", NUM_EXPERTS, HIDDEN)
        bias = 0.3 * torch.randn(NUM_EXPERTS, generator=generator)
        tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = bias
        for expert in range(NUM_EXPERTS):
            mlp(f"{prefix}.mlp.experts.{expert}", WIDTH, scale)
        mlp(f"{prefix}.mlp.shared_experts", WIDTH, scale)

    tensors["model.embed_tokens.weight"] = torch.randn((VOCAB_SIZE, HIDDEN), generator=generator)
    norm("model.norm", HIDDEN)
    for index in range(num_layers):
        layer(f"model.layers.{index}", has_experts=index >= num_dense)
    matrix("lm_head", VOCAB_SIZE, HIDDEN, LOGIT_SCALE)
    for index in range(num_layers, num_layers + num_mtp_layers):
        extra = f"model.layers.{index}"
        layer(extra, has_experts=True, scale=branch_scale)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            norm(f"{extra}.{name}", HIDDEN)
        matrix(f"{extra}.eh_proj", HIDDEN, 2 * HIDDEN)
        tensors[f"{extra}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{extra}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    fields = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 80,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": YARN,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "dtype": "float32",
        "q_lora_rank": QUERY_RANK,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": WIDTH,
        "first_k_dense_replace": num_dense,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": num_mtp_layers,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields, indent=2))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return write_tokenizer(directory)
