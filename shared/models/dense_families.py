"""Architectures without experts, except Gemma's. No torch here."""

from __future__ import annotations

from dataclasses import replace

from shared.models.family import MULTIPLIERS, NORMS_BEHIND, Family, LayerNorms, NormRule, Window

ERNIE_DEFAULTS = {"tie_word_embeddings": True, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5}
_LLAMA = Family(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    is_mha_by_default=True,
)
_MISTRAL = Family(window=Window.IF_SET, defaults={"sliding_window": 4096})
_GLM = Family(
    qkv_bias="attention_bias",
    has_own_head_dim=True,
    fused=("gate_up",),
    rotary_share=0.5,
    is_interleaved=True,
    defaults={"attention_bias": True},
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
    rope_of_images=("mrope_section", "mrope_interleaved"),
    text_type="qwen3_vl_text",
    defaults={"head_dim": 128, "rope_theta": 500_000.0},
)
DENSE_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": replace(_MISTRAL, text_type="mistral"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window=Window.IF_USED),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        window=Window.IF_USED,
        has_own_head_dim=True,
    ),
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "MiMoForCausalLM": Family(qkv_bias=True, window=Window.IF_USED, has_mtp=True),
    "Phi3ForCausalLM": Family(
        window=Window.IF_SET,
        is_mha_by_default=True,
        fused=("qkv", "gate_up"),
        rotary_share=1.0,
        rope_aliases={"su": "longrope", "yarn": "longrope"},
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(
        _GLM,
        layer_norms=LayerNorms(
            after_attention="post_self_attn_layernorm",
            before_mlp="post_attention_layernorm",
            after_mlp="post_mlp_layernorm",
        ),
        defaults={**_GLM.defaults, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
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
    "HunYuanDenseV1ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_late_qk_norm=True,
        has_rope_alpha=True,
        is_mha_by_default=True,
        refused={"use_qk_norm": (True,), "use_cla": (False,), "mlp_bias": (False,)},
        defaults={"rms_norm_eps": 1e-5},
    ),
    "Ernie4_5ForCausalLM": Family(
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        is_mha_by_default=True,
        is_interleaved=True,
        defaults={"head_dim": 128, **ERNIE_DEFAULTS},
    ),
}
