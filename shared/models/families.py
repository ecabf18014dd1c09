"""What distinguishes the supported architectures from each other, as switches. No torch here."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.models.experts_config import ExpertsFamily, ExpertTensors, GroupScore, Scoring

MIMO = "MiMoForCausalLM"
MULTIPLIERS = (
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
)  # fmt: skip


class Window(enum.Enum):
    """When a checkpoint's `sliding_window` holds."""

    NEVER = enum.auto()
    IF_SET = enum.auto()
    IF_USED = enum.auto()
    """`use_sliding_window` says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the class of one architecture in transformers computes, beside what all do.

    Args:
        qkv_bias, o_bias, mlp_bias: Whether these projections have a bias, or the field of
            config.json that says so.
        has_qk_norm: q and k are RMS-normalised per head, or the field that says so.
        has_wide_qk_norm: They are, all heads at once.
        has_post_norms: Norms are behind attention and MLP, not before them.
        has_own_head_dim: `head_dim` must be in config.json; else hidden_size / heads by default.
        is_mha_by_default: Without `num_key_value_heads` every head has its own K and V.
        fused: Projections that are one tensor: "qkv", "gate_up".
        rotary_share: What an absent `partial_rotary_factor` means; None: there is no such field.
        is_interleaved: The rotary embedding pairs neighbours.
        rope_aliases: Its own names of rope types.
        has_latent_attention: Multi-head latent attention.
        has_vision: The checkpoint has a vision tower beside the language model, whose fields are in
            `text_config`; the tower is left out.
        refused: Fields that this family alone reads, and that are not implemented -> the values,
            besides None, that ask for nothing.
        implemented: Fields that are refused for other families, and computed for this one.
        defaults: What absent fields mean, where it is not what they mean for all.
        experts: How config.json describes experts; None: there are none.
        has_mtp: `num_nextn_predict_layers` layers of multi-token prediction follow the others.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    has_qk_norm: bool | str = False
    has_wide_qk_norm: bool = False
    has_post_norms: bool = False
    window: Window = Window.NEVER
    has_own_head_dim: bool = False
    is_mha_by_default: bool = False
    fused: tuple[str, ...] = ()
    rotary_share: float | None = None
    is_interleaved: bool = False
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    has_latent_attention: bool = False
    has_vision: bool = False
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    implemented: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    experts: ExpertsFamily | None = None
    has_mtp: bool = False


_DEEPSEEK_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
_DEEPSEEK_FIELDS = ("kv_lora_rank", *_DEEPSEEK_COUNTS)
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        is_mha_by_default=True,
    ),
    "MistralForCausalLM": Family(window=Window.IF_SET, defaults={"sliding_window": 4096}),
    "Mistral3ForConditionalGeneration": Family(
        window=Window.IF_SET,
        has_vision=True,
        defaults={"sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window=Window.IF_USED),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        window=Window.IF_USED,
        has_own_head_dim=True,
    ),
    MIMO: Family(qkv_bias=True, window=Window.IF_USED, has_mtp=True),
    "Phi3ForCausalLM": Family(
        window=Window.IF_SET,
        is_mha_by_default=True,
        fused=("qkv", "gate_up"),
        rotary_share=1.0,
        implemented=("partial_rotary_factor",),
        rope_aliases={"su": "longrope", "yarn": "longrope"},
    ),
    "GlmForCausalLM": Family(
        qkv_bias="attention_bias",
        has_own_head_dim=True,
        fused=("gate_up",),
        rotary_share=0.5,
        is_interleaved=True,
        implemented=("partial_rotary_factor",),
        defaults={"attention_bias": True},
    ),
    "GraniteForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        is_mha_by_default=True,
        implemented=MULTIPLIERS,
        defaults={"attention_multiplier": 1.0},
    ),
    "SmolLM3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        refused={"use_sliding_window": (False,)},
        implemented=("no_rope_layers",),
        defaults={
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
    ),
    "Olmo2ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_wide_qk_norm=True,
        has_post_norms=True,
        is_mha_by_default=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "SeedOssForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        has_own_head_dim=True,
        is_mha_by_default=True,
        defaults={"attention_bias": True},
    ),
    "MixtralForCausalLM": Family(
        window=Window.IF_SET,
        is_mha_by_default=True,
        implemented=("num_local_experts", "num_experts"),
        defaults={"rms_norm_eps": 1e-5},
        experts=ExpertsFamily(
            count_fields=("num_local_experts", "num_experts"),
            width_field="intermediate_size",
            always_normalises=True,
            tensors=ExpertTensors(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        window=Window.IF_USED,
        implemented=("num_experts", "num_local_experts"),
        experts=ExpertsFamily(),
    ),
    "Glm4MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        has_qk_norm="use_qk_norm",
        rotary_share=0.5,
        implemented=("n_routed_experts", "num_local_experts", "partial_rotary_factor"),
        defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": True, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
        experts=ExpertsFamily(
            count_fields=("n_routed_experts", "num_local_experts"),
            scoring=Scoring.SIGMOID,
            has_correction_bias=True,
            has_shared=True,
            has_groups=True,
        ),
        has_mtp=True,
    ),
    "DeepseekV2ForCausalLM": Family(
        has_latent_attention=True,
        is_interleaved=True,
        implemented=_DEEPSEEK_FIELDS,
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
    "DeepseekV3ForCausalLM": Family(
        has_latent_attention=True,
        is_interleaved=True,
        implemented=_DEEPSEEK_FIELDS,
        refused={"attention_bias": (False,), "rope_interleave": (True,)}
        | {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "moe_layer_freq": (1,)},
        defaults={"norm_topk_prob": True, "n_shared_experts": 1, "n_group": 8, "topk_group": 4}
        | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
        experts=ExpertsFamily(
            count_fields=_DEEPSEEK_COUNTS,
            scoring=Scoring.SIGMOID,
            has_correction_bias=True,
            has_shared=True,
            has_groups=True,
        ),
        has_mtp=True,
    ),
}
TARGET_ARCHITECTURES = tuple(FAMILIES)
