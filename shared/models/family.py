"""Switches in which architectures differ from Llama. No torch here."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.models.experts_config import ExpertsFamily

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
    CENTERED = enum.auto()
    """As WIDE, of rows whose mean has been taken off them: LayerNorms without biases."""

    @property
    def is_centered(self) -> bool:
        """Return whether norms take the mean off a row first."""
        return self is NormRule.CENTERED


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """What the norms of a layer are called; None: there is none at that place.

    Args:
        is_parallel: The MLP reads what attention reads, and both are added.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    is_parallel: bool = False


NORMS_BEHIND = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
NORM_OF_BOTH = LayerNorms(before_mlp=None, is_parallel=True)
NORMS_AROUND = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


class Ungated(enum.StrEnum):
    """Activations of MLPs that have no gate; the values are those of config.json."""

    RELU2 = "relu2"
    """The square of what is above 0."""
    XIELU = "xielu"
    """A parabola above 0, an exponential below, both with learned numbers (arXiv:2411.13010)."""


class Window(enum.Enum):
    """Where a checkpoint's `sliding_window` holds, if `layer_types` does not say it."""

    NEVER = enum.auto()
    IF_SET = enum.auto()
    """In every layer."""
    PATTERN = enum.auto()
    """In all but every `sliding_window_pattern`-th layer, which sees everything."""
    PATTERN_FROM_FULL = enum.auto()
    """As PATTERN, but the first layer sees everything."""
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
        requires_window: `sliding_window` must be a number: without one it means something else.
        has_own_head_dim: `head_dim` must be in config.json; else hidden_size / heads by default.
        is_mha_by_default: Without `num_key_value_heads` every head has its own K and V.
        fused: Projections that are one tensor: "qkv", "gate_up".
        rotary_share: What an absent `partial_rotary_factor` means; None: there is no such field.
        is_interleaved: The rotary embedding pairs neighbours.
        rope_aliases: Its own names of rope types.
        has_rope_alpha: Rope type "dynamic" with an `alpha` is a fixed stretch of the base.
        rope_ignored: Keys of its rotary embedding that change nothing for tokens of text.
        has_query_scaling: Queries grow with their positions, as `llama_4_scaling_beta` says.
        has_local_rope: Layers with a window have a rotary embedding of their own.
        rotates_windows_only: If there is a window, layers without it are not rotated.
        has_scaled_embedding: Embeddings are multiplied by sqrt(hidden_size).
        has_query_scalar: Scores are divided by the root of `query_pre_attn_scalar`.
        activation_field: What says how gates of MLPs are activated.
        ungated: The activation of MLPs without a gate; None: they have one.
        has_latent_attention: Multi-head latent attention.
        text_types: The checkpoint has a vision tower beside a language model of one of these
            `model_type`s, whose fields are in `text_config`; the tower is left out. Empty: there is
            none.
        has_flat_text: Published files have no `text_config`: its fields are among the others.
        variants: What the architecture is where `text_config` is of other types than `text_types`.
        refused: Fields that this family alone reads, and that are not implemented -> the values,
            besides None, that ask for nothing.
        implemented: Fields that are refused for other families and computed for this one, beside
            those that `computed_fields` adds.
        defaults: What absent fields mean, where it is not what they mean for all.
        other_names: Field -> the name by which it is also written.
        layer_lists: Fields that may have a value for each layer; all must be the same.
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
    requires_window: bool = False
    has_own_head_dim: bool = False
    is_mha_by_default: bool = False
    fused: tuple[str, ...] = ()
    rotary_share: float | None = None
    is_interleaved: bool = False
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    has_rope_alpha: bool = False
    rope_ignored: tuple[str, ...] = ()
    has_query_scaling: bool = False
    has_local_rope: bool = False
    rotates_windows_only: bool = False
    has_scaled_embedding: bool = False
    has_query_scalar: bool = False
    activation_field: str = "hidden_act"
    ungated: Ungated | None = None
    has_latent_attention: bool = False
    text_types: tuple[str, ...] = ()
    has_flat_text: bool = False
    variants: tuple[Family, ...] = ()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    implemented: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    layer_lists: tuple[str, ...] = ()
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
