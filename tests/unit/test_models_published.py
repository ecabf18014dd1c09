"""config.json of models with experts as they are on the Hub, whose fields are not transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.errors import CheckpointError
from shared.models.experts_config import GroupScore, Scoring
from shared.models.rope_config import RopeConfig, RopeKind
from tests.unit.test_models_config import published

KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "aux_loss_alpha": 0.001, "ep_size": 1, "model_type": "kimi_k2", "moe_layer_freq": 1,
    "first_k_dense_replace": 1, "hidden_size": 7168, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
    "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 1, "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}  # fmt: skip
GLM_46 = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "head_dim": 128,
    "first_k_dense_replace": 3, "model_type": "glm4_moe", "moe_intermediate_size": 1536,
    "n_group": 1, "n_routed_experts": 160, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000, "topk_group": 1,
    "routed_scaling_factor": 2.5, "use_qk_norm": True,
}  # fmt: skip
GLM_47_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "hidden_size": 2048,
    "first_k_dense_replace": 1, "kv_lora_rank": 512, "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4,
    "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0,
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8, "topk_group": 1,
    "topk_method": "noaux_tc", "v_head_dim": 256,
}  # fmt: skip


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "KimiK2ForCausalLM"])
def test_kimi_k2(tmp_path: Path, architecture: str) -> None:
    config = published(tmp_path, KIMI_K2 | {"architectures": [architecture]})
    assert (config.quantization, config.num_mtp_layers) == ("fp8", 0)
    assert config.rope.kind is RopeKind.YARN
    assert config.rope.is_interleaved
    experts = config.experts
    assert experts is not None
    assert (experts.num_experts, experts.num_groups, experts.shared_width) == (384, 1, 2048)
    assert (experts.scaling_factor, experts.dense_layers) == (2.827, {0})


def test_glm_46_and_47(tmp_path: Path) -> None:
    config = published(tmp_path, GLM_46)
    assert (config.has_qkv_bias, config.has_o_bias, config.has_qk_norm) == (True, False, True)
    assert config.rope == RopeConfig(theta=1e6, rotary_share=0.5)
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.dense_layers) == (160, {0, 1, 2})
    assert config.num_mtp_layers == 1


def test_glm_47_flash(tmp_path: Path) -> None:
    config = published(tmp_path, GLM_47_FLASH)
    assert config.rope == RopeConfig(theta=1e6, is_interleaved=True)
    assert config.kv_layout.width == 576
    experts = config.experts
    assert experts is not None
    assert (experts.num_experts, experts.num_experts_per_tok, experts.width) == (64, 4, 1536)
    assert (experts.scoring, experts.group_score) == (Scoring.SIGMOID, GroupScore.BEST_TWO)
    assert (experts.is_normalised, experts.scaling_factor) == (True, 1.8)
    assert (config.num_mtp_layers, experts.dense_layers) == (1, {0})
    listed = ["sparse", "dense"] * 4
    both = published(tmp_path, GLM_47_FLASH | {"mlp_layer_types": listed}).experts
    assert both is not None
    assert both.dense_layers == {1, 3, 5, 7}, "as the class in transformers, which reads the list"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (GLM_47_FLASH | {"mlp_layer_types": ["dense"]}, "mlp_layer_types must hold"),
        (GLM_47_FLASH | {"mlp_layer_types": ["moe"] * 8}, "mlp_layer_types must hold"),
        (GLM_47_FLASH | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ],
)
def test_what_a_family_cannot_mean_is_named(
    tmp_path: Path, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(CheckpointError, match=name):
        published(tmp_path, fields)
