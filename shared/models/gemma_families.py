"""Gemma, with and without experts. No torch here."""

from __future__ import annotations

from dataclasses import replace

from shared.models.experts_config import ExpertsFamily, ExpertTensors
from shared.models.family import NORMS_AROUND, Family, NormRule, Window

_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
_GEMMA2 = Family(
    window=Window.PATTERN,
    window_period=2,
    has_own_head_dim=True,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    layer_norms=NORMS_AROUND,
    norm_rule=NormRule.OFFSET,
    has_scaled_embedding=True,
    has_query_scalar=True,
    activation_field="hidden_activation",
    implemented=("attn_logit_softcapping", "final_logit_softcapping"),
    refused={"use_bidirectional_attention": (False,)},
    defaults={
        **_GEMMA_DEFAULTS,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
_GEMMA3 = replace(
    _GEMMA2,
    window_period=6,
    has_qk_norm=True,
    has_local_rope=True,
    implemented=("final_logit_softcapping",),
    defaults={**_GEMMA_DEFAULTS, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
)
_GEMMA4_UNIFIED = Family(
    window=Window.PATTERN,
    window_period=6,
    has_own_head_dim=True,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    has_qk_norm=True,
    has_v_norm=True,
    has_layer_heads=True,
    has_layer_scalar=True,
    has_shared_kv=True,
    has_local_rope=True,
    layer_norms=NORMS_AROUND,
    norm_rule=NormRule.WIDE,
    has_scaled_embedding=True,
    activation_field="hidden_activation",
    implemented=("attention_multiplier", "final_logit_softcapping"),
    refused={"use_bidirectional_attention": ("vision",)},  # images alone are seen so
    defaults={
        "attention_multiplier": 1.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 1024,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
    },
)
_GEMMA4 = replace(
    _GEMMA4_UNIFIED,
    has_per_layer_inputs=True,
    experts=ExpertsFamily(
        count_per_tok_field="top_k_experts",
        always_normalises=True,
        is_beside_mlp=True,
        switch="enable_moe_block",
        tensors=ExpertTensors(
            block="",
            router="router.proj",
            expert_scale="router.per_expert_scale",
            is_fused=True,
            is_halved=True,
            is_transposed=False,
        ),
    ),
    defaults={
        **_GEMMA4_UNIFIED.defaults,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "sliding_window": 512,
        "max_position_embeddings": 131_072,
    },
)
GEMMA_FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        text_types=("gemma3_text",),
        implemented=(),
        # Published files leave out what is as in the class.
        defaults={
            **_GEMMA3.defaults,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, text_types=("gemma4_text",)),
    "Gemma4UnifiedForCausalLM": _GEMMA4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": replace(
        _GEMMA4_UNIFIED, text_types=("gemma4_unified_text",)
    ),
}
