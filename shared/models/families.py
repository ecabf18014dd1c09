"""What distinguishes the supported architectures from each other, as switches. No torch here."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shared.models.experts_config import ExpertsFamily, ExpertTensors, GroupScore, Scoring

MIMO = "MiMoForCausalLM"
MULTIPLIERS = (
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
)  # fmt: skip


class NormRule(enum.Enum):
    """How RMS norms scale what they have normalised, in float32."""

    ROUNDED = enum.auto()
    """Rounded to the dtype of the model first (Llama)."""
    WIDE = enum.auto()
    """By a weight in float32, and rounded last."""
    OFFSET = enum.auto()
    """As WIDE, by 1 + weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """What the norms of a layer are called; None: there is none at that place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


NORMS_BEHIND = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
NORMS_AROUND = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


class Window(enum.Enum):
    """Where a checkpoint's `sliding_window` holds, if `layer_types` does not say it."""

    NEVER = enum.auto()
    IF_SET = enum.auto()
    """In every layer."""
    PATTERN = enum.auto()
    """In all but every `sliding_window_pattern`-th layer, which sees everything."""
    IF_USED = enum.auto()
    """If `use_sliding_window`, from layer `max_window_layers` on."""
    IF_USED_BY_ALL = enum.auto()
    """If `use_sliding_window`, in every layer, whatever `layer_types` says."""
    IF_USED_EVEN = enum.auto()
    """If `use_sliding_window`, in the even ones of the first `max_window_layers` layers."""
    IF_USED_UNROTATED = enum.auto()
    """If `use_sliding_window`, in layers without a rotary embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the class of one architecture in transformers computes, beside what all do.

    Args:
        qkv_bias, o_bias, mlp_bias: Whether these projections have a bias, or the field of
            config.json that says so.
        has_qk_norm: q and k are RMS-normalised per head, or the field that says so.
        has_wide_qk_norm: They are, all heads at once.
        has_late_qk_norm: They are, per head, after the rotary embedding.
        has_v_norm: Each head of V is RMS-normalised, without a weight.
        has_layer_heads: K/V heads of layers without a window may be others, see layer_heads.py.
        has_window_heads: Heads of layers with a window may be others, see window_heads.py.
        has_layer_scalar: What a layer returns is multiplied by a learned number.
        has_shared_kv: The last `num_kv_shared_layers` layers have no K and V, see shared_kv.py.
        has_per_layer_inputs: Each layer reads an embedding of its own of every token, if
            `hidden_size_per_layer_input` says so.
        sinks: Tensor of attention sinks, of each head a learned score without a V; "": there are
            none.
        layer_norms: Where the norms of a layer are.
        norm_rule: How all norms scale.
        window: Where `sliding_window` holds.
        window_period: What an absent `sliding_window_pattern` means.
        has_own_head_dim: `head_dim` must be in config.json; else hidden_size / heads by default.
        is_mha_by_default: Without `num_key_value_heads` every head has its own K and V.
        fused: Projections that are one tensor: "qkv", "gate_up".
        rotary_share: What an absent `partial_rotary_factor` means; None: there is no such field.
        is_interleaved: The rotary embedding pairs neighbours.
        rope_aliases: Its own names of rope types.
        has_rope_alpha: Rope type "dynamic" with an `alpha` is a fixed stretch of the base.
        rope_of_images: Keys of its rotary embedding that say where images are, not tokens of text.
        has_local_rope: Layers with a window have a rotary embedding of their own.
        rotates_windows_only: If there is a window, layers without it are not rotated.
        has_scaled_embedding: Embeddings are multiplied by sqrt(hidden_size).
        has_query_scalar: Scores are divided by the root of `query_pre_attn_scalar`.
        activation_field: What says how gates of MLPs are activated.
        has_latent_attention: Multi-head latent attention.
        text_type: The checkpoint has a vision tower beside a language model of this `model_type`,
            whose fields are in `text_config`; the tower is left out. "": there is none.
        refused: Fields that this family alone reads, and that are not implemented -> the values,
            besides None, that ask for nothing.
        implemented: Fields that are refused for other families and computed for this one, beside
            those that `computed_fields` adds.
        defaults: What absent fields mean, where it is not what they mean for all.
        other_names: Field -> the name by which it is also written.
        experts: How config.json describes experts; None: there are none.
        has_mtp: `num_nextn_predict_layers` layers of multi-token prediction follow the others.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    has_qk_norm: bool | str = False
    has_wide_qk_norm: bool = False
    has_late_qk_norm: bool = False
    has_v_norm: bool = False
    has_layer_heads: bool = False
    has_layer_scalar: bool = False
    has_shared_kv: bool = False
    has_per_layer_inputs: bool = False
    has_window_heads: bool = False
    sinks: str = ""
    layer_norms: LayerNorms = LayerNorms()
    norm_rule: NormRule = NormRule.ROUNDED
    window: Window = Window.NEVER
    window_period: int = 0
    has_own_head_dim: bool = False
    is_mha_by_default: bool = False
    fused: tuple[str, ...] = ()
    rotary_share: float | None = None
    is_interleaved: bool = False
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    has_rope_alpha: bool = False
    rope_of_images: tuple[str, ...] = ()
    has_local_rope: bool = False
    rotates_windows_only: bool = False
    has_scaled_embedding: bool = False
    has_query_scalar: bool = False
    activation_field: str = "hidden_act"
    has_latent_attention: bool = False
    text_type: str = ""
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    implemented: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertsFamily | None = None
    has_mtp: bool = False

    @property
    def computed_fields(self) -> frozenset[str]:
        """Return all fields that are refused for other families and computed for this one."""
        fields = [*self.implemented]
        if self.has_latent_attention:
            fields.append("kv_lora_rank")
        if self.rotary_share is not None:
            fields.append("partial_rotary_factor")
        if self.experts is not None:
            fields += self.experts.count_fields
        return frozenset(fields)


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
_ERNIE = {"tie_word_embeddings": True, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
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
_QWEN3_VL = Family(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    has_qk_norm=True,
    is_mha_by_default=True,
    rope_of_images=("mrope_section", "mrope_interleaved"),
    text_type="qwen3_vl_text",
    defaults={"head_dim": 128, "rope_theta": 500_000.0},
)
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
FAMILIES: dict[str, Family] = {
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
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    MIMO: Family(qkv_bias=True, window=Window.IF_USED, has_mtp=True),
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
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        text_type="gemma3_text",
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
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, text_type="gemma4_text"),
    "Gemma4UnifiedForCausalLM": _GEMMA4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": replace(
        _GEMMA4_UNIFIED, text_type="gemma4_unified_text"
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
        _QWEN3_VL,
        text_type="qwen3_vl_moe_text",
        defaults={"rope_theta": 500_000.0},
        experts=ExpertsFamily(
            always_normalises=True, tensors=ExpertTensors(is_fused=True, is_halved=True)
        ),
    ),
    "Glm4MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        has_qk_norm="use_qk_norm",
        rotary_share=0.5,
        defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": True, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
        experts=_SIGMOID_EXPERTS,
        has_mtp=True,
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
        defaults={"head_dim": 128, **_ERNIE},
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        is_interleaved=True,
        refused={"use_bias": (False,), "moe_norm_min": (1e-12,)},
        defaults={"num_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2}
        | {"moe_intermediate_size": 1536, "first_k_dense_replace": 1, **_ERNIE},
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
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_V3,
        defaults={"norm_topk_prob": True, "n_shared_experts": 1, "routed_scaling_factor": 1.8}
        | {"first_k_dense_replace": 1, "rms_norm_eps": 1e-5},
    ),
}
TARGET_ARCHITECTURES = tuple(FAMILIES)
