"""A tiny MiMo-V2 as published: heads by kind of layer, narrow values, experts, layers of MTP."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.checkpoints import EOS_ID, LOGIT_SCALE, VOCAB_SIZE, Tensors, write_tokenizer

HIDDEN, NUM_EXPERTS, WIDTH = 48, 4, 24
FIELDS: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "hybrid_layer_pattern": [0, 1, 1],
    "hybrid_block_size": None,
    "moe_layer_freq": [0, 1, 1],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 20,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 24,
    "swa_v_head_dim": 20,
    "attention_bias": False,
    "attention_value_scale": 0.707,
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "sliding_window": 12,
    "sliding_window_size": 12,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "max_position_embeddings": 512,
    "layernorm_epsilon": 1e-5,
    "hidden_act": "silu",
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": None,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": WIDTH,
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "eos_token_id": EOS_ID,
    "torch_dtype": "float32",
}
"""As transformers reads them, too."""

OTHER_HEADS = {
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 3,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "add_full_attention_sink_bias": True,
    "attention_bias": True,
    "rope_theta": 3000.0,
    "swa_rope_theta": 300.0,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 1.5,
}
"""What SGLang and vLLM read and transformers does not."""


def write_mimo_v2(
    directory: Path,
    *,
    seed: int = 0,
    branch_scale: float = 1.0,
    num_mtp_layers: int = 3,
    **fields: Any,
) -> Path:
    """Write a MiMoV2FlashForCausalLM, and its layers of MTP.

    Args:
        branch_scale: Small values make the layers of MTP agree with the target.
        fields: Of config.json, beside `FIELDS`; it says how many layers of MTP there are unless
            these are the published three.
    """
    generator = torch.Generator().manual_seed(seed)
    config, tensors = FIELDS | fields, Tensors()
    if num_mtp_layers != 3:
        config["num_nextn_predict_layers"] = num_mtp_layers

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(size, generator=generator)

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        tensors[f"{name}.weight"] = normal(rows, columns, scale=scale / math.sqrt(columns))

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = 1 + normal(HIDDEN, scale=0.2)

    def mlp(prefix: str, width: int) -> None:
        for name in ("gate_proj", "up_proj"):
            matrix(f"{prefix}.{name}", width, HIDDEN)
        matrix(f"{prefix}.down_proj", HIDDEN, width, branch_scale)

    def attention(prefix: str, *, has_window: bool) -> None:
        kind = "swa_" if has_window else ""
        heads, kv_heads, dim, v_dim = (
            config[f"{kind}{name}"]
            for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
        )
        for name, width in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * v_dim)):
            matrix(f"{prefix}.{name}_proj", width, HIDDEN)
            if config["attention_bias"]:
                tensors[f"{prefix}.{name}_proj.bias"] = normal(width, scale=0.3)
        matrix(f"{prefix}.o_proj", HIDDEN, heads * v_dim, branch_scale)
        if config[f"add_{'swa' if has_window else 'full'}_attention_sink_bias"]:
            tensors[f"{prefix}.attention_sink_bias"] = 1 + normal(heads)

    tensors["model.embed_tokens.weight"] = normal(VOCAB_SIZE, HIDDEN)
    norm("model.norm")
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        norm(f"{prefix}.input_layernorm")
        norm(f"{prefix}.post_attention_layernorm")
        attention(f"{prefix}.self_attn", has_window=bool(config["hybrid_layer_pattern"][index]))
        if not config["moe_layer_freq"][index]:
            mlp(f"{prefix}.mlp", config["intermediate_size"])
            continue
        matrix(f"{prefix}.mlp.gate", NUM_EXPERTS, HIDDEN)
        tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = normal(NUM_EXPERTS, scale=0.3)
        for expert in range(NUM_EXPERTS):
            mlp(f"{prefix}.mlp.experts.{expert}", WIDTH)
    matrix("lm_head", VOCAB_SIZE, HIDDEN, LOGIT_SCALE)
    for index in range(num_mtp_layers):
        prefix = f"model.mtp.layers.{index}"
        norms = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
        for name in norms:
            norm(f"{prefix}.{name}")
        attention(f"{prefix}.self_attn", has_window=True)
        mlp(f"{prefix}.mlp", config["intermediate_size"])
        mixed = normal(HIDDEN, 2 * HIDDEN, scale=branch_scale / math.sqrt(2 * HIDDEN))
        if branch_scale < 1:  # mostly the embedding's half
            mixed[:, :HIDDEN] += torch.eye(HIDDEN)
        tensors[f"{prefix}.eh_proj.weight"] = mixed
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return write_tokenizer(directory)
