"""Architectures without experts, except Gemma's. No torch here."""

from __future__ import annotations

from dataclasses import replace

from shared.models.family import (
    MULTIPLIERS,
    NORM_OF_BOTH,
    NORMS_BEHIND,
    Family,
    LayerNorms,
    NormRule,
    Ungated,
    Window,
)

ERNIE_DEFAULTS = {"tie_word_embeddings": True, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5}
_LLAMA = Family(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    is_mha_by_default=True,
)
MISTRAL = Family(window=Window.IF_SET, defaults={"sliding_window": 4096})
# As its class reads files without a rotary embedding.
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL3 = Family(
    window=Window.IF_SET,
    is_mha_by_default=True,
    has_query_scaling=True,
    rope_ignored=("max_position_embeddings",),
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_scaling": _MINISTRAL3_ROPE},
)
_GLM = Family(
    qkv_bias="attention_bias",
    has_own_head_dim=True,
    fused=("gate_up",),
    rotary_share=0.5,
    is_interleaved=True,
    defaults={"attention_bias": True},
)
_CWM_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_APERTUS_ROPE = {**_CWM_ROPE, "factor": 8.0}
_COHERE = Family(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    is_mha_by_default=True,
    is_interleaved=True,
    layer_norms=NORM_OF_BOTH,
    norm_rule=NormRule.CENTERED,
    implemented=("logit_scale",),
    refused={"use_qk_norm": (False,), "use_parallel_block": (True,), "rotary_pct": (1.0,)}
    | {"use_gated_activation": (True,), "position_embedding_type": ("rope_gptj",)},
    defaults={"rms_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
    | {"rope_theta": 500_000.0},
    other_names={"rms_norm_eps": "layer_norm_eps"},
)
_OLMO2 = Family(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    has_wide_qk_norm=True,
    layer_norms=NORMS_BEHIND,
    norm_rule=NormRule.WIDE,
    is_mha_by_default=True,
    defaults={"rms_norm_eps": 1e-5},
)
QWEN3_VL = Family(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    has_qk_norm=True,
    is_mha_by_default=True,
    rope_ignored=("mrope_section", "mrope_interleaved"),
    text_types=("qwen3_vl_text",),
    defaults={"head_dim": 128, "rope_theta": 500_000.0},
)
_QWEN2_VL = Family(
    qkv_bias=True,
    window=Window.IF_USED,
    is_mha_by_default=True,
    rope_aliases={"mrope": "default"},
    rope_ignored=("mrope_section",),
    has_flat_text=True,
    defaults={"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5}
    | {"sliding_window": 4096, "max_window_layers": 80},
)
_GLM4 = replace(
    _GLM,
    layer_norms=LayerNorms(
        after_attention="post_self_attn_layernorm",
        before_mlp="post_attention_layernorm",
        after_mlp="post_mlp_layernorm",
    ),
    defaults={**_GLM.defaults, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
)
_GLM4V = replace(
    _GLM4,
    qkv_bias=True,
    has_own_head_dim=False,
    is_mha_by_default=True,
    rotary_share=1.0,
    rope_ignored=("mrope_section",),
    text_types=("glm4v_text",),
    defaults={"rms_norm_eps": 1e-5},
)
HUNYUAN_DENSE = Family(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    has_late_qk_norm=True,
    has_rope_alpha=True,
    is_mha_by_default=True,
    refused={"use_qk_norm": (True,), "use_cla": (False,), "mlp_bias": (False,)},
    defaults={"rms_norm_eps": 1e-5},
)
DENSE_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": MISTRAL,
    "MinistralForCausalLM": MISTRAL,
    "Ministral3ForCausalLM": MINISTRAL3,
    "Qwen2ForCausalLM": Family(qkv_bias=True, window=Window.IF_USED),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        window=Window.IF_USED,
        has_own_head_dim=True,
    ),
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen2VLForConditionalGeneration": replace(_QWEN2_VL, text_types=("qwen2_vl_text",)),
    "Qwen2_5_VLForConditionalGeneration": replace(_QWEN2_VL, text_types=("qwen2_5_vl_text",)),
    "MiMoForCausalLM": Family(qkv_bias=True, window=Window.IF_USED, has_mtp=True),
    "Phi3ForCausalLM": Family(
        window=Window.IF_SET,
        is_mha_by_default=True,
        fused=("qkv", "gate_up"),
        rotary_share=1.0,
        rope_aliases={"su": "longrope", "yarn": "longrope"},
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM4,
    "Glm4vForConditionalGeneration": _GLM4V,
    "Glm46VForConditionalGeneration": _GLM4V,
    "CwmForCausalLM": Family(
        mlp_bias="mlp_bias",
        is_mha_by_default=True,
        window=Window.PATTERN_FROM_FULL,
        window_period=4,
        defaults={"head_dim": 128, "sliding_window": 8192, "rope_theta": 1_000_000.0}
        | {"rms_norm_eps": 1e-5, "rope_scaling": _CWM_ROPE},
    ),
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": replace(
        _COHERE,
        window=Window.PATTERN,
        window_period=4,
        requires_window=True,  # without one its class rotates no layer
        rotates_windows_only=True,
        defaults={**_COHERE.defaults, "sliding_window": 4096, "rope_theta": 10_000.0},
    ),
    "ArceeForCausalLM": replace(_LLAMA, ungated=Ungated.RELU2, defaults={"rms_norm_eps": 1e-5}),
    "ApertusForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        is_mha_by_default=True,
        layer_norms=LayerNorms(
            before_attention="attention_layernorm", before_mlp="feedforward_layernorm"
        ),
        ungated=Ungated.XIELU,
        refused={"qk_norm": (True,), "post_norm": (False,), "mlp_bias": (False,)},
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0, "rope_scaling": _APERTUS_ROPE},
    ),
    # Its files are those of a Llama; the other fields are of code that nothing published uses.
    "IQuestCoderForCausalLM": replace(
        _LLAMA,
        refused={"use_sliding_window": (False,)},
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    ),
    "GraniteForCausalLM": replace(
        _LLAMA, implemented=MULTIPLIERS, defaults={"attention_multiplier": 1.0}
    ),
    "SmolLM3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        window=Window.IF_USED_UNROTATED,
        implemented=("no_rope_layers",),
        defaults={
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        window=Window.PATTERN,
        window_period=4,
        has_local_rope=True,
        defaults={**_OLMO2.defaults, "sliding_window": 4096, "rope_theta": 500_000.0},
    ),
    "Exaone4ForCausalLM": Family(
        has_qk_norm=True,
        layer_norms=NORMS_BEHIND,
        window=Window.PATTERN,
        window_period=4,
        rotates_windows_only=True,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    "SeedOssForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        has_own_head_dim=True,
        is_mha_by_default=True,
        defaults={"attention_bias": True},
    ),
    # transformers' own class writes the names of Llama, and knows only qkv_bias = bias.
    "InternLM3ForCausalLM": Family(
        qkv_bias="qkv_bias",
        o_bias="bias",
        mlp_bias="bias",
        has_own_head_dim=True,
        other_names={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    ),
    "HunYuanDenseV1ForCausalLM": HUNYUAN_DENSE,
    "Ernie4_5ForCausalLM": Family(
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        is_mha_by_default=True,
        is_interleaved=True,
        defaults={"head_dim": 128, **ERNIE_DEFAULTS},
    ),
}
