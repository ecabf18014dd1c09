"""Architectures with experts, except Gemma's. No torch here."""

from __future__ import annotations

from dataclasses import replace

from shared.models.dense_families import ERNIE_DEFAULTS, HUNYUAN_DENSE, QWEN3_VL
from shared.models.experts_config import ExpertsFamily, ExpertTensors, GroupScore, Scoring
from shared.models.family import Family, NormRule, Window

_MIXTRAL_EXPERTS = ExpertsFamily(
    count_fields=("num_local_experts", "num_experts"),
    width_field="intermediate_size",
    always_normalises=True,
    tensors=ExpertTensors(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
)
_SIGMOID_EXPERTS = ExpertsFamily(
    count_fields=("n_routed_experts", "num_local_experts"),
    scoring=Scoring.SIGMOID,
    router_bias="gate.e_score_correction_bias",
    has_shared=True,
    has_groups=True,
)
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEEPSEEK_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
_DEEPSEEK_V3 = Family(
    has_latent_attention=True,
    is_interleaved=True,
    refused={"attention_bias": (False,), "rope_interleave": (True,)}
    | {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "moe_layer_freq": (1,)},
    defaults={"norm_topk_prob": True, "n_shared_experts": 1, "n_group": 8, "topk_group": 4}
    | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
    experts=replace(_SIGMOID_EXPERTS, count_fields=_DEEPSEEK_COUNTS),
    has_mtp=True,
)
_GLM4_MOE = Family(
    qkv_bias="attention_bias",
    has_qk_norm="use_qk_norm",
    rotary_share=0.5,
    defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": True, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
    experts=_SIGMOID_EXPERTS,
    has_mtp=True,
)
_EXAONE_MOE = Family(
    has_qk_norm=True,
    window=Window.PATTERN,
    window_period=4,
    rotates_windows_only=True,
    refused={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "norm_topk_prob": True}
    | {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
    other_names={"n_shared_experts": "num_shared_experts"},
    experts=replace(
        _SIGMOID_EXPERTS, count_fields=("num_experts",), router_bias="e_score_correction_bias"
    ),
)
_KIMI_K25 = replace(_DEEPSEEK_V3, text_types=("kimi_k2", "deepseek_v3"))
# As its class reads files without a rotary embedding.
_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MISTRAL4 = Family(
    has_latent_attention=True,
    is_interleaved=True,
    has_query_scaling=True,
    # A head's rotated share follows from its widths.
    rope_ignored=("max_position_embeddings", "partial_rotary_factor"),
    refused={"attention_bias": (False,), "rope_interleave": (True,)},
    defaults={"norm_topk_prob": True, "n_shared_experts": 1, "rope_scaling": _MISTRAL4_ROPE},
    experts=ExpertsFamily(
        count_fields=_DEEPSEEK_COUNTS,
        has_shared=True,
        has_groups=True,
        tensors=ExpertTensors(is_fused=True, is_halved=True, is_transposed=False),
    ),
)
EXPERT_FAMILIES: dict[str, Family] = {
    "MixtralForCausalLM": Family(
        window=Window.IF_SET,
        is_mha_by_default=True,
        defaults={"rms_norm_eps": 1e-5},
        experts=_MIXTRAL_EXPERTS,
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias="qkv_bias",
        window=Window.IF_USED_EVEN,
        defaults={"qkv_bias": True},
        experts=ExpertsFamily(
            shared_width_field="shared_expert_intermediate_size",
            has_shared_gate=True,
            tensors=ExpertTensors(shared="shared_expert"),
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        window=Window.IF_USED_BY_ALL,
        experts=ExpertsFamily(),
    ),
    "Qwen3VLMoeForConditionalGeneration": replace(
        QWEN3_VL,
        text_types=("qwen3_vl_moe_text",),
        defaults={"rope_theta": 500_000.0},
        experts=ExpertsFamily(
            always_normalises=True, tensors=ExpertTensors(is_fused=True, is_halved=True)
        ),
    ),
    "Glm4MoeForCausalLM": _GLM4_MOE,
    "Glm4vMoeForConditionalGeneration": replace(
        _GLM4_MOE,
        has_qk_norm=False,
        rope_ignored=("mrope_section",),
        text_types=("glm4v_moe_text",),
        refused={"use_qk_norm": (False,)},
        defaults={**_GLM4_MOE.defaults, "attention_bias": True, "head_dim": 128},
    ),
    "SolarOpenForCausalLM": Family(
        qkv_bias="attention_bias",
        rotary_share=1.0,
        refused={"use_qk_norm": (False,)},
        defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": True, "n_shared_experts": 1}
        | {"head_dim": 128, "rope_theta": 1_000_000.0},
        experts=_SIGMOID_EXPERTS,
    ),
    "ExaoneMoeForCausalLM": _EXAONE_MOE,
    # So published files call it.
    "ExaoneMoEForCausalLM": _EXAONE_MOE,
    "HunYuanMoEV1ForCausalLM": replace(
        HUNYUAN_DENSE,
        refused={
            **HUNYUAN_DENSE.refused,
            "use_mla": (False,),
            "num_shared_expert": (1,),
            "moe_layer_num_skipped": (0,),
            "group_limited_greedy": (False,),
            "routed_scaling_factor": (1.0,),
        },
        layer_lists=("moe_topk", "moe_intermediate_size", "num_experts", "num_shared_expert"),
        implemented=("kv_lora_rank",),  # which only layers with latents read, see use_mla
        experts=ExpertsFamily(
            count_fields=("num_experts",),
            count_per_tok_field="moe_topk",
            width_field="intermediate_size",
            shared_width_field="intermediate_size",
            always_normalises=True,
            tensors=ExpertTensors(router="gate.wg", shared="shared_mlp"),
        ),
    ),
    "MiniMaxM2ForCausalLM": Family(
        has_wide_qk_norm=True,
        rotary_share=1.0,
        refused={"use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "sliding_window": ()}
        | {"scoring_func": ("sigmoid",), "use_routing_bias": (True,)}
        | {"shared_intermediate_size": (0,)},
        defaults={"head_dim": 128, "rope_theta": 5_000_000.0},
        experts=replace(
            _MIXTRAL_EXPERTS,
            scoring=Scoring.SIGMOID,
            router_bias="e_score_correction_bias",
        ),
    ),
    "OlmoeForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_wide_qk_norm=True,
        is_mha_by_default=True,
        defaults={"rms_norm_eps": 1e-5},
        experts=ExpertsFamily(width_field="intermediate_size"),
    ),
    # Its class reads no `use_sliding_window`.
    "Dots1ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        is_mha_by_default=True,
        window=Window.IF_USED,
        refused={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)}
        | {"moe_layer_freq": (1,)},
        defaults={"sliding_window": 4096, "max_window_layers": 62, "use_sliding_window": True},
        experts=_SIGMOID_EXPERTS,
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        is_interleaved=True,
        refused={"use_bias": (False,), "moe_norm_min": (1e-12,)},
        defaults={"num_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2}
        | {"moe_intermediate_size": 1536, "first_k_dense_replace": 1, **ERNIE_DEFAULTS},
        other_names={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
        | {"n_shared_experts": "moe_num_shared_experts"}
        | {"first_k_dense_replace": "moe_layer_start_index"}
        | {"decoder_sparse_step": "moe_layer_interval"},
        experts=ExpertsFamily(
            count_fields=("num_experts",),
            router_bias="moe_statics.e_score_correction_bias",
            always_normalises=True,
            has_shared=True,
            tensors=ExpertTensors(is_bias_matrix=True),
        ),
    ),
    "GptOssForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        sinks="sinks",
        norm_rule=NormRule.WIDE,
        window=Window.PATTERN,
        window_period=2,
        has_own_head_dim=True,
        defaults={"attention_bias": True, "head_dim": 64, "sliding_window": 128}
        | {"rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "rope_scaling": _GPT_OSS_ROPE}
        | {"torch_dtype": "bfloat16"},  # of published tensors beside MXFP4, whose files omit it
        experts=ExpertsFamily(
            count_fields=("num_local_experts", "num_experts"),
            width_field="intermediate_size",
            scoring=Scoring.SOFTMAX_OF_CHOSEN,
            router_bias="router.bias",
            has_bias=True,
            is_clamped=True,
            always_normalises=True,
            tensors=ExpertTensors(router="router", is_fused=True),
        ),
    ),
    "MiMoV2FlashForCausalLM": Family(
        qkv_bias="attention_bias",
        has_own_head_dim=True,
        has_window_heads=True,
        sinks="attention_sink_bias",
        window=Window.PATTERN,
        window_period=6,
        rotary_share=0.334,
        has_local_rope=True,
        implemented=("attention_value_scale",),
        refused={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
        | {"n_shared_experts": (0,), "rope_scaling": (), "hybrid_block_size": ()}
        | {"attention_projection_layout": ("split",)},
        # Published files name neither their layers of multi-token prediction nor these defaults.
        defaults={"num_nextn_predict_layers": 3, "attention_value_scale": 0.707}
        | {"rope_theta": 5_000_000.0, "rope_local_base_freq": 10_000.0, "rms_norm_eps": 1e-5}
        | {"norm_topk_prob": True, "first_k_dense_replace": 1, "sliding_window": 129},
        other_names={"rms_norm_eps": "layernorm_epsilon", "rope_local_base_freq": "swa_rope_theta"},
        experts=replace(_SIGMOID_EXPERTS, has_shared=False),
        has_mtp=True,
    ),
    "DeepseekV2ForCausalLM": Family(
        has_latent_attention=True,
        is_interleaved=True,
        # It never divides weights by their sum.
        refused={"attention_bias": (False,), "mlp_bias": (False,), "norm_topk_prob": (False,)}
        | {"topk_method": ("greedy", "group_limited_greedy"), "scoring_func": ("softmax",)}
        | {"moe_layer_freq": (1,)},
        experts=ExpertsFamily(
            count_fields=_DEEPSEEK_COUNTS,
            has_shared=True,
            has_groups=True,
            group_score=GroupScore.BEST,
        ),
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "KimiK2ForCausalLM": _DEEPSEEK_V3,
    "KimiK25ForConditionalGeneration": _KIMI_K25,
    # So transformers calls it.
    "Kimi_K25ForConditionalGeneration": _KIMI_K25,
    "Mistral4ForCausalLM": MISTRAL4,
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_V3,
        defaults={"norm_topk_prob": True, "n_shared_experts": 1, "routed_scaling_factor": 1.8}
        | {"first_k_dense_replace": 1, "rms_norm_eps": 1e-5},
    ),
}
