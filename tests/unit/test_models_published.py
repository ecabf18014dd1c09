"""config.json of models of 2025 and 2026 as on the Hub, with fields that transformers renames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import CheckpointError
from shared.models.experts_config import GroupScore, Scoring
from shared.models.llama import CausalLM
from shared.models.rope_config import RopeConfig, RopeKind
from tests import families
from tests.checkpoints import edit_checkpoint
from tests.unit.test_models_config import published
from tests.unit.test_models_llama import Runner, tokens_of

CPU = torch.device("cpu")

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
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 8, "head_dim": 128,
    "intermediate_size": 1536, "model_type": "minimax_m2", "mtp_transformer_layers": 1,
    "num_attention_heads": 48, "num_experts_per_tok": 8, "num_key_value_heads": 8,
    "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_mtp": True,
    "use_qk_norm": True, "use_routing_bias": True,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "weight_block_size": [128, 128],
    },
}  # fmt: skip
DOTS1 = {
    "architectures": ["Dots1ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1,
    "head_dim": 128, "model_type": "dots1", "moe_intermediate_size": 1408, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True,
    "num_experts_per_tok": 6, "rope_scaling": None, "rope_theta": 10000000,
    "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "sliding_window": None,
    "topk_group": 1,
}  # fmt: skip
ERNIE_21B = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 2560, "head_dim": None,
    "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64], "moe_gate": "topk",
    "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_interval": 1,
    "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    "moe_use_aux_free": True, "num_attention_heads": 20, "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False,
}  # fmt: skip
HUNYUAN_7B = {
    "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": False, "head_dim": 128,
    "cla_share_factor": 2, "mlp_bias": False, "model_type": "hunyuan_v1_dense",
    "norm_type": "rms", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "use_cla": False,
    "use_qk_norm": True, "use_rotary_pos_emb": True,
    "rope_scaling": {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "type": "dynamic",
    },
}  # fmt: skip
QWEN3_VL_2B = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
        "rope_scaling": {
            "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
        },
        "tie_word_embeddings": True, "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "vision_config": {"deepstack_visual_indexes": [5, 11, 17], "model_type": "qwen3_vl"},
}  # fmt: skip


KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "media_placeholder_token_id": 163605, "model_type": "kimi_k25", "tie_word_embeddings": False,
    "text_config": {
        **{name: value for name, value in KIMI_K2.items() if name != "quantization_config"},
        "intermediate_size": 18432, "max_position_embeddings": 262144, "num_hidden_layers": 61,
        "tie_word_embeddings": False, "vocab_size": 163840,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "input_activations": None, "output_activations": None, "targets": ["Linear"],
                    "weights": {
                        "actorder": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                        "observer": "minmax", "strategy": "group", "symmetric": True, "type": "int",
                    },
                },
            },
            "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
    },
    "vision_config": {"mm_hidden_size": 1152, "model_type": "kimi_k25"},
}  # fmt: skip
MINISTRAL_3_8B = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    "text_config": {
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
        "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn",
        },
        "sliding_window": None, "vocab_size": 131072,
    },
    "tie_word_embeddings": False,
    "quantization_config": {
        "activation_scheme": "static", "dequantize": False, "quant_method": "fp8",
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        "weight_block_size": None,
    },
    "vision_config": {"model_type": "pixtral"},
}  # fmt: skip
MISTRAL_SMALL_4 = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    "text_config": {
        "hidden_size": 4096, "intermediate_size": 12288, "kv_lora_rank": 256,
        "max_position_embeddings": 1048576, "model_type": "mistral4", "moe_intermediate_size": 2048,
        "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts_per_tok": 4, "num_hidden_layers": 36,
        "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6, "topk_group": 1, "v_head_dim": 128, "vocab_size": 131072,
    },
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN25_VL_72B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0,
    "hidden_act": "silu", "hidden_size": 8192, "image_token_id": 151655,
    "intermediate_size": 29568, "max_position_embeddings": 128000, "max_window_layers": 80,
    "model_type": "qwen2_5_vl", "num_attention_heads": 64, "num_hidden_layers": 80,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "sliding_window": 32768,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280}, "vocab_size": 152064, "head_dim": None,
}  # fmt: skip
GLM_45V = {
    "architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe",
    "text_config": GLM_46 | {
        "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944,
        "max_position_embeddings": 65536, "model_type": "glm4v_moe_text", "n_routed_experts": 128,
        "moe_intermediate_size": 1408, "num_attention_heads": 96, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "use_qk_norm": False, "vocab_size": 151552,
        "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"},
    },
    "tie_word_embeddings": False,
    "vision_config": {"depth": 24, "model_type": "glm4v_moe"},
}  # fmt: skip
HUNYUAN_A13B = {
    "architectures": ["HunYuanMoEV1ForCausalLM"], "attention_bias": False, "head_dim": None,
    "attention_head_dim": 128, "cla_share_factor": 2, "group_limited_greedy": False,
    "hidden_size": 4096, "intermediate_size": 3072, "kv_lora_rank": 512, "mlp_bias": False,
    "model_type": "hunyuan_v1_moe", "moe_drop_tokens": False, "moe_intermediate_size": [3072] * 8,
    "moe_layer_num_skipped": 0, "moe_topk": [8] * 8, "num_attention_heads": 32, "num_experts": 64,
    "num_key_value_heads": 8, "num_shared_expert": [1] * 8, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "type": "dynamic",
    },
    "rope_theta": 10000.0, "routed_scaling_factor": 1.0, "tie_word_embeddings": True,
    "use_cla": False, "use_mixed_mlp_moe": True, "use_mla": False, "use_qk_norm": True,
}  # fmt: skip
COMMAND_R7B = {
    "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "layer_norm_eps": 1e-4,
    "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192,
    "model_type": "cohere2", "num_attention_heads": 32, "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
    "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
    "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
    "use_parallel_block": True, "use_parallel_embedding": True, "use_qk_norm": False,
}  # fmt: skip
K_EXAONE = {
    "architectures": ["ExaoneMoEForCausalLM"], "first_k_dense_replace": 1, "head_dim": 128,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 3
    + ["full_attention"], "model_type": "exaone_moe", "moe_intermediate_size": 2048, "n_group": 1,
    "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "topk_group": 1,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "sliding_window": 128,
    "sliding_window_pattern": "LLLG", "topk_method": "noaux_tc",
}  # fmt: skip


def _with_rope(values: dict[str, Any]) -> dict[str, Any]:
    """Return a Ministral 3 alone whose rotary embedding has other values."""
    text: dict[str, Any] = MINISTRAL_3_8B["text_config"]  # type: ignore[assignment]
    rope = {"rope_parameters": text["rope_parameters"] | values}
    return text | {"architectures": ["Ministral3ForCausalLM"]} | rope


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
    assert {shape.width for shape in config.kv_layout.layers} == {576}
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


def test_minimax_m2(tmp_path: Path) -> None:
    config = published(tmp_path, MINIMAX_M2)
    assert (config.has_wide_qk_norm, config.has_qk_norm, config.num_mtp_layers) == (True, False, 0)
    assert config.rope == RopeConfig(theta=5e6, rotary_share=0.5)
    assert config.quantization == "fp8"
    experts = config.experts
    assert experts is not None
    assert (experts.num_experts, experts.num_experts_per_tok, experts.width) == (256, 8, 1536)
    assert (experts.scoring, experts.is_normalised) == (Scoring.SIGMOID, True)
    assert (experts.shared_width, experts.dense_layers) == (0, frozenset())


def test_dots1(tmp_path: Path) -> None:
    config = published(tmp_path, DOTS1)
    assert (config.sliding_window, config.layer_windows) == (0, ())
    assert config.experts is not None
    assert (config.experts.shared_width, config.experts.dense_layers) == (2816, {0})
    windows = published(tmp_path, DOTS1 | {"sliding_window": 64, "max_window_layers": 6})
    assert windows.layer_windows == (0, 0, 0, 0, 0, 0, 64, 64)


def test_ernie_21b(tmp_path: Path) -> None:
    config = published(tmp_path, ERNIE_21B)
    assert (config.head_dim, config.is_tied, config.num_mtp_layers) == (128, True, 0)
    assert config.rope == RopeConfig(theta=5e5, is_interleaved=True)
    experts = config.experts
    assert experts is not None
    assert (experts.num_experts, experts.num_experts_per_tok) == (64, 6)
    assert (experts.shared_width, experts.dense_layers) == (3072, {0})
    every_other = {"moe_layer_start_index": 3, "moe_layer_end_index": 6, "moe_layer_interval": 2}
    some = published(tmp_path, ERNIE_21B | every_other).experts
    assert some is not None
    assert some.dense_layers == {0, 1, 2, 4, 6, 7}
    last = published(tmp_path, ERNIE_21B | {"moe_layer_end_index": -1}).experts
    assert last == experts


def test_hunyuan(tmp_path: Path) -> None:
    config = published(tmp_path, HUNYUAN_7B)
    assert (config.has_late_qk_norm, config.has_qk_norm, config.has_o_bias) == (True, False, False)
    assert config.rope == RopeConfig(theta=1e4 * 1000.0 ** (128 / 126))
    plain = published(tmp_path, HUNYUAN_7B | {"rope_scaling": None})
    assert plain.rope == RopeConfig(theta=1e4)


def test_qwen3_vl(tmp_path: Path) -> None:
    config = published(tmp_path, QWEN3_VL_2B)
    assert config.rope == RopeConfig(theta=5e6)
    assert (config.has_qk_norm, config.has_qkv_bias, config.is_tied) == (True, False, True)
    assert (config.has_vision, config.head_dim, config.num_kv_heads) == (True, 128, 8)


def test_kimi_k25(tmp_path: Path) -> None:
    config = published(tmp_path, KIMI_K25)
    assert (config.quantization, config.num_mtp_layers, config.has_vision) == ("int4", 0, True)
    assert (config.rope.factor, config.rope.mscale_all_dim) == (64.0, 1.0)
    experts = config.experts
    assert experts is not None
    assert (experts.num_experts, experts.num_groups, experts.dense_layers) == (384, 1, {0})


def test_ministral_3(tmp_path: Path) -> None:
    config = published(tmp_path, MINISTRAL_3_8B)
    assert (config.rope.query_beta, config.rope.original_max_position) == (0.1, 16384)
    assert (config.rope.theta, config.rope.factor, config.rope.attention_factor) == (1e6, 16.0, 1.0)
    assert (config.head_dim, config.sliding_window, config.quantization) == (128, 0, "fp8")
    plain = MINISTRAL_3_8B["text_config"] | {"rope_parameters": None}  # type: ignore[operator]
    assert published(tmp_path, MINISTRAL_3_8B | {"text_config": plain}).rope == config.rope
    alone = plain | {"architectures": ["Ministral3ForCausalLM"]}
    assert published(tmp_path, alone).rope == config.rope


def test_mistral_small_4(tmp_path: Path) -> None:
    config = published(tmp_path, MISTRAL_SMALL_4)
    assert (config.rope.query_beta, config.rope.original_max_position) == (0.1, 8192)
    assert {shape.width for shape in config.kv_layout.layers} == {320}
    experts = config.experts
    assert experts is not None
    assert (experts.scoring, experts.group_score) == (Scoring.SOFTMAX, GroupScore.BEST_TWO)
    assert (experts.num_experts, experts.dense_layers) == (128, frozenset())


def test_qwen25_vl(tmp_path: Path) -> None:
    config = published(tmp_path, QWEN25_VL_72B)
    assert config.rope == RopeConfig(theta=1e6)
    assert (config.has_qkv_bias, config.has_vision, config.head_dim) == (True, True, 128)
    assert (config.sliding_window, config.layer_windows) == (0, ())
    windows = {"use_sliding_window": True, "max_window_layers": 78, "sliding_window": 64}
    assert published(tmp_path, QWEN25_VL_72B | windows).layer_windows == (0,) * 78 + (64,) * 2


def test_glm_45v(tmp_path: Path) -> None:
    config = published(tmp_path, GLM_45V)
    assert config.rope == RopeConfig(theta=1e6, rotary_share=0.5)
    assert (config.has_qkv_bias, config.has_qk_norm, config.has_vision) == (True, False, True)


def test_hunyuan_a13b(tmp_path: Path) -> None:
    config = published(tmp_path, HUNYUAN_A13B)
    assert config.rope == RopeConfig(theta=1e4 * 1000.0 ** (128 / 126))
    assert (config.has_late_qk_norm, config.is_tied, config.latent) == (True, True, None)
    experts = config.experts
    assert experts is not None
    assert (experts.num_experts, experts.num_experts_per_tok, experts.width) == (64, 8, 3072)
    assert (experts.shared_width, experts.is_normalised, experts.scoring) == (
        3072,
        True,
        Scoring.SOFTMAX,
    )


def test_k_exaone(tmp_path: Path) -> None:
    config = published(tmp_path, K_EXAONE)
    assert config.layer_windows == (128, 128, 128, 0) * 2
    assert config.unrotated_layers == (3, 7)
    assert (config.has_qk_norm, config.num_mtp_layers) == (True, 0)
    experts = config.experts
    assert experts is not None
    assert (experts.num_experts, experts.shared_width, experts.dense_layers) == (128, 2048, {0})


def test_command_r7b(tmp_path: Path) -> None:
    config = published(tmp_path, COMMAND_R7B)
    assert config.rope == RopeConfig(theta=5e4, is_interleaved=True)
    assert config.layer_windows == (4096, 4096, 4096, 0) * 2
    assert config.unrotated_layers == (3, 7)
    assert (config.rms_norm_eps, config.logits_scaling, config.is_tied) == (1e-4, 4.0, True)
    assert config.layer_norms.is_parallel
    assert config.norm_rule.is_centered


def test_cwm_without_a_list_of_layers(tmp_path: Path) -> None:
    config = published(tmp_path, {"architectures": ["CwmForCausalLM"]})
    assert config.layer_windows == (0, 8192, 8192, 8192) * 2
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == (RopeKind.LLAMA3, 1e6, 16.0)


def test_the_layer_of_mtp_of_ernie_is_left_out(tmp_path: Path) -> None:
    directory = families.write(tmp_path, "ernie4_5_moe", **families.ERNIE4_5_MOE)
    ids = tokens_of(9)
    before = Runner(CausalLM.from_checkpoint(directory, CPU, torch.float32)).extend(ids).hidden
    extra = {f"model.{name}.0.weight": torch.ones(2) for name in ("mtp_block", "mtp_linear_proj")}
    edit_checkpoint(directory, tensors=lambda tensors: tensors.update(extra))
    after = Runner(CausalLM.from_checkpoint(directory, CPU, torch.float32)).extend(ids).hidden
    assert torch.equal(after, before)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (GLM_47_FLASH | {"mlp_layer_types": ["dense"]}, "mlp_layer_types must hold"),
        (GLM_47_FLASH | {"mlp_layer_types": ["moe"] * 8}, "mlp_layer_types must hold"),
        (GLM_47_FLASH | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (MINIMAX_M2 | {"rotary_dim": "64"}, "rotary_dim must be"),
        (MINIMAX_M2 | {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
        (MINIMAX_M2 | {"shared_intermediate_size": 8}, "shared_intermediate_size = 8"),
        (HUNYUAN_7B | {"use_cla": True}, "use_cla = True"),
        (HUNYUAN_7B | {"rope_scaling": {"type": "dynamic", "alpha": -1}}, "alpha must be"),
        (HUNYUAN_7B | {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 2.0}}, "alpha"),
        (COMMAND_R7B | {"use_qk_norm": True}, "use_qk_norm = True"),
        (COMMAND_R7B | {"use_parallel_block": False}, "use_parallel_block = False"),
        (COMMAND_R7B | {"sliding_window": None}, "sliding_window must be a positive integer"),
        (COMMAND_R7B | {"rotary_pct": 0.5}, "rotary_pct = 0.5"),
        (COMMAND_R7B | {"logit_scale": 0}, "logit_scale must be"),
        ({"architectures": ["ArceeForCausalLM"], "hidden_act": "silu"}, "only relu2"),
        ({"architectures": ["ApertusForCausalLM"], "hidden_act": "relu2"}, "only xielu"),
        ({"architectures": ["ApertusForCausalLM"], "post_norm": True}, "post_norm = True"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_act": "relu2"}, "hidden_act = 'relu2'"),
        (HUNYUAN_A13B | {"moe_topk": [8] * 7 + [4]}, "moe_topk = .* all layers must have the same"),
        (HUNYUAN_A13B | {"moe_topk": []}, "moe_topk = "),
        (HUNYUAN_A13B | {"num_shared_expert": [2] * 8}, "num_shared_expert = 2"),
        (HUNYUAN_A13B | {"use_mla": True}, "use_mla = True"),
        (HUNYUAN_A13B | {"routed_scaling_factor": 2.0}, "routed_scaling_factor = 2.0"),
        (K_EXAONE | {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        (
            GLM_45V | {"text_config": GLM_46 | {"model_type": "glm4v_moe_text"}},
            "use_qk_norm = True",
        ),
        (GLM_45V | {"text_config": GLM_46}, "must be an object of model_type 'glm4v_moe_text'"),
        (
            MINISTRAL_3_8B | {"text_config": {"model_type": "llama"}},
            "model_type 'mistral' or 'ministral3' or 'mistral4'",
        ),
        (_with_rope({"llama_4_scaling_beta": -0.1}), "llama_4_scaling_beta must be"),
        (_with_rope({"original_max_position_embeddings": None}), "original_max_position"),
        (
            _with_rope({}) | {"architectures": ["LlamaForCausalLM"]},
            "llama_4_scaling_beta = 0.1 is not supported",
        ),
        (ERNIE_21B | {"use_bias": True}, "use_bias = True"),
        (ERNIE_21B | {"moe_norm_min": 0.5}, "moe_norm_min = 0.5"),
        (ERNIE_21B | {"moe_layer_end_index": "7"}, "moe_layer_end_index must be"),
    ],
)
def test_what_a_family_cannot_mean_is_named(
    tmp_path: Path, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(CheckpointError, match=name):
        published(tmp_path, fields)
