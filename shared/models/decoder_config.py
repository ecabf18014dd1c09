"""What a checkpoint's config.json says, for every supported architecture. No torch here.

Fields that would change the computation and are not implemented are refused by name; fields that
only describe (use_cache, initializer_range, ...) are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError
from shared.kv.layout import CacheShape, KVLayout
from shared.models.config_fields import require_int, require_positive
from shared.models.config_file import (
    architecture_of,
    read_config_json,
    read_eos_token_ids,
    refuse_architecture,
)
from shared.models.experts_config import ExpertsConfig, parse_experts
from shared.models.families import FAMILIES, TARGET_ARCHITECTURES
from shared.models.family import Family, LayerNorms, NormRule, Ungated
from shared.models.family_fields import has_gelu, parse_multipliers, parse_ropes
from shared.models.language_fields import language_fields, variant_of
from shared.models.latent_config import LatentConfig, parse_latent
from shared.models.layer_heads import LayerHeads, parse_layer_heads
from shared.models.per_layer_config import PerLayerConfig, parse_per_layer
from shared.models.quantization import parse_quantization
from shared.models.rope_config import RopeConfig
from shared.models.shared_kv import with_shared_kv
from shared.models.window_config import parse_windows
from shared.models.window_heads import with_window_heads

DTYPES = ("float32", "float16", "bfloat16")
MAX_POSITIONS = 1 << 22
"""Longest context that a checkpoint may claim: tables of the rotary embedding have a row for each
position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder as config.json describes it; family.py says what differs between architectures.

    Args:
        num_heads, num_kv_heads: Query heads, K/V heads.
        has_qkv_bias, has_o_bias, has_mlp_bias: Which projections have a bias.
        has_qk_norm: q and k are RMS-normalised per head before the rotary embedding.
        sinks: Name of the tensor of attention sinks: of each query head a score without a V, which
            all tokens see; "": there are none.
        has_wide_qk_norm: They are, over the values of all heads at once.
        has_late_qk_norm: They are, per head, after the rotary embedding.
        layer_norms: Where the norms of a layer are, and what they are called.
        norm_rule: How all norms scale.
        fused_projections: Projections that are one tensor in the checkpoint: "qkv", "gate_up".
        embedding_multiplier: What embeddings are multiplied by before the first layer.
        attention_multiplier: What scores are multiplied by; None: 1 / sqrt(head_dim).
        residual_multiplier: What attention and MLP are multiplied by before they are added.
        logits_scaling: What logits are divided by.
        has_scaled_embedding: Embeddings are multiplied by sqrt(hidden_size), rounded to the model's
            dtype.
        has_gelu: Gates of MLPs and experts pass gelu, approximated by tanh, not silu.
        ungated: The activation of MLPs without a gate; None: they have one.
        attention_softcap, logits_softcap: Soft limits of scores and logits, see `tree_attention`;
            0: there is none.
        local_rope: Rotary embedding of the layers with a window; None: `rope`.
        sliding_window: In every layer a token sees the last `sliding_window` tokens at most, itself
            included; 0 = all.
        layer_windows: What it sees in each layer, where that differs; empty: in all the same.
        is_tied: The output head is the embedding.
        dtype: "float32", "float16" or "bfloat16", what the weights were saved for.
        unrotated_layers: Layers without a rotary embedding.
        has_vision: A vision tower is in the checkpoint, too, and left out.
        num_mtp_layers: Layers of multi-token prediction in the checkpoint.
        mtp: Those layers as a decoder, where they are other layers than the last ones of the model.
        v_head_dim: Values of a head of V; None: `head_dim`.
        v_multiplier: What V is multiplied by.
        layer_heads: Heads of each layer, where layers differ in them; empty: all have those above.
        has_v_norm: Each head of V is RMS-normalised, without a weight.
        has_k_as_v: V is what K's projection returns, before K's norm and rotary embedding.
        has_own_kv: Layers have K and V; False: they attend to those of other layers, or of another
            model's.
        kv_layers: Layer whose K and V each layer attends to, its own or those of one before it;
            empty: each to its own.
        layer_intermediate_sizes: `intermediate_size` of each layer, where layers differ in it;
            empty: all have that above.
        per_layer: Of embeddings that each layer has of its own; None: there are none.
        has_layer_scalar: What a layer returns is multiplied by a learned number.
        latent: Of multi-head latent attention, in which `num_kv_heads` and `head_dim` are those of
            the queries; None: heads have K and V.
        quantization: How weights are quantised: "fp8" or "int4" (projections), "mxfp4" (experts),
            or "".
        eos_token_ids: Ids that end a text, from generation_config.json if it says, else from
            config.json.
        experts: Feed-forwards that a router chooses from; None: every layer has one, dense.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_wide_qk_norm: bool = False
    has_late_qk_norm: bool = False
    sinks: str = ""
    v_head_dim: int | None = None
    v_multiplier: float = 1.0
    has_v_norm: bool = False
    has_k_as_v: bool = False
    has_own_kv: bool = True
    has_layer_scalar: bool = False
    layer_heads: tuple[LayerHeads, ...] = ()
    kv_layers: tuple[int, ...] = ()
    layer_intermediate_sizes: tuple[int, ...] = ()
    per_layer: PerLayerConfig | None = None
    layer_norms: LayerNorms = LayerNorms()
    norm_rule: NormRule = NormRule.ROUNDED
    fused_projections: tuple[str, ...] = ()
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    has_scaled_embedding: bool = False
    has_gelu: bool = False
    ungated: Ungated | None = None
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    local_rope: RopeConfig | None = None
    sliding_window: int = 0
    layer_windows: tuple[int, ...] = ()
    is_tied: bool = False
    dtype: str = "float32"
    unrotated_layers: tuple[int, ...] = ()
    has_vision: bool = False
    num_mtp_layers: int = 0
    mtp: ModelConfig | None = None
    latent: LatentConfig | None = None
    quantization: str = ""
    eos_token_ids: tuple[int, ...] = ()
    experts: ExpertsConfig | None = None

    @property
    def rope_width(self) -> int:
        """Return how many values of a head the rotary embedding sees."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def v_dim(self) -> int:
        """Return how many values a head of V has."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def kv_layout(self) -> KVLayout:
        """Return what its layers keep of every token."""
        if self.latent is not None:
            width = self.latent.cached_width
            return KVLayout.uniform(self.num_layers, 1, width, caches=("latent",))
        layers = self.layer_heads or (self,) * self.num_layers
        shapes = [
            CacheShape(num_heads=one.num_kv_heads, width=one.head_dim, v_width=one.v_head_dim)
            for one in layers
        ]
        own = sorted({self.kv_layer(layer_id) for layer_id in range(self.num_layers)})
        return KVLayout(layers=tuple(shapes[layer_id] for layer_id in own))

    @property
    def cache_of_layer(self) -> tuple[int, ...]:
        """Return which caches of `kv_layout` each layer writes or reads."""
        layers = [self.kv_layer(layer_id) for layer_id in range(self.num_layers)]
        own = sorted(set(layers))
        return tuple(own.index(layer_id) for layer_id in layers)

    @property
    def head_shapes(self) -> list[tuple[int, CacheShape]]:
        """Return the query heads of a layer and the shape of its caches, once for each that
        differs.
        """
        layers = range(self.num_layers)
        return [*dict.fromkeys((self.at_layer(i).num_heads, self.cache_shape(i)) for i in layers)]

    def kv_layer(self, layer_id: int) -> int:
        """Return the layer whose K and V a layer attends to."""
        return self.kv_layers[layer_id] if self.kv_layers else layer_id

    def cache_shape(self, layer_id: int) -> CacheShape:
        """Return the shape of the caches that a layer writes or reads."""
        return self.kv_layout.layers[self.cache_of_layer[layer_id]]

    def at_layer(self, layer_id: int) -> ModelConfig:
        """Return the config of one layer, which may be another than the first one's."""
        config = self.with_heads(self.layer_heads[layer_id]) if self.layer_heads else self
        if self.kv_layer(layer_id) != layer_id:
            config = replace(config, has_own_kv=False)
        if self.layer_intermediate_sizes:
            config = replace(config, intermediate_size=self.layer_intermediate_sizes[layer_id])
        return config

    def with_heads(self, heads: LayerHeads) -> ModelConfig:
        """Return the config of layers that all have these heads."""
        return replace(
            self,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            v_head_dim=heads.v_head_dim,
            has_k_as_v=heads.has_k_as_v,
            sinks=self.sinks if heads.has_sinks else "",
            layer_heads=(),
        )

    @classmethod
    def from_checkpoint(cls, directory: Path) -> ModelConfig:
        """Read config.json (and generation_config.json) of a causal language model.

        Raises: CheckpointError naming the field or architecture that is missing or unsupported.
        """
        fields = read_config_json(directory)
        source = f"{directory / 'config.json'}"
        architecture = architecture_of(fields, source)
        refuse_architecture(architecture, source)
        if architecture not in TARGET_ARCHITECTURES:
            raise CheckpointError(
                f"{source}: architecture {architecture!r} is not supported as a language model; "
                f"supported are {', '.join(TARGET_ARCHITECTURES)}"
            )
        config = parse_model_config(fields, source, architecture)
        return replace(config, eos_token_ids=read_eos_token_ids(directory, config.vocab_size))


def parse_model_config(fields: Mapping[str, Any], source: str, architecture: str) -> ModelConfig:
    """Turn the fields of a config.json into a ModelConfig, without the ids that end a text.

    Args:
        source: File to name in errors.
        architecture: One of TARGET_ARCHITECTURES; a draft head passes the one it resembles.
    Raises: CheckpointError naming the field.
    """
    family = variant_of(FAMILIES[architecture], fields)
    fields = language_fields(fields, source, family)
    latent = parse_latent(fields, source) if family.has_latent_attention else None
    num_heads, num_kv_heads, head_dim = _parse_heads(fields, source, family, latent)
    num_layers = require_int(fields, "num_hidden_layers", source)
    max_positions = _parse_positions(fields, source)
    windows, unrotated = _parse_layers(fields, source, family, num_layers)
    rope, local_rope = parse_ropes(
        fields,
        source,
        family,
        head_dim=head_dim if latent is None else latent.qk_rope_head_dim,
        max_positions=max_positions,
        windows=windows,
    )
    multipliers: dict[str, Any] = parse_multipliers(fields, source, family)
    is_gelu = has_gelu(fields, source, family)
    experts = None
    if family.experts:
        experts = parse_experts(fields, source, family.experts, num_layers, has_gelu=is_gelu)
    heads = LayerHeads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    config = ModelConfig(
        vocab_size=require_int(fields, "vocab_size", source),
        hidden_size=require_int(fields, "hidden_size", source),
        intermediate_size=require_int(fields, "intermediate_size", source),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_parse_epsilon(fields, source),
        max_position_embeddings=max_positions,
        rope=rope,
        local_rope=local_rope,
        has_qkv_bias=_is_set(fields, family.qkv_bias),
        has_o_bias=_is_set(fields, family.o_bias),
        has_mlp_bias=_is_set(fields, family.mlp_bias),
        has_scaled_embedding=family.has_scaled_embedding,
        has_gelu=is_gelu,
        ungated=family.ungated,
        has_qk_norm=_is_set(fields, family.has_qk_norm),
        has_wide_qk_norm=family.has_wide_qk_norm,
        has_late_qk_norm=family.has_late_qk_norm,
        sinks=family.sinks,
        has_v_norm=family.has_v_norm,
        has_layer_scalar=family.has_layer_scalar,
        layer_heads=parse_layer_heads(fields, source, windows, heads)
        if family.has_layer_heads
        else (),
        layer_norms=family.layer_norms,
        norm_rule=family.norm_rule,
        fused_projections=family.fused,
        sliding_window=max(windows) if all(windows) else 0,
        layer_windows=windows if len(set(windows)) > 1 else (),
        is_tied=bool(fields.get("tie_word_embeddings", False)),
        dtype=_parse_dtype(fields, source),
        unrotated_layers=unrotated,
        has_vision=bool(family.text_types),
        num_mtp_layers=int(fields.get("num_nextn_predict_layers") or 0) if family.has_mtp else 0,
        latent=latent,
        experts=experts,
        per_layer=parse_per_layer(fields, source) if family.has_per_layer_inputs else None,
        quantization=parse_quantization(
            fields, source, has_fused_experts=experts is not None and experts.tensors.is_fused
        ),
        **multipliers,
    )
    if family.has_shared_kv:
        config = with_shared_kv(config, fields, source, windows)
    if not family.has_window_heads:
        return config
    return with_window_heads(config, fields, source, windows, heads)


def _parse_layers(
    fields: Mapping[str, Any], source: str, family: Family, num_layers: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the window of each layer, as `parse_windows` does, and the layers without a rotary
    embedding.
    """
    unrotated = _parse_unrotated(fields, source, family, num_layers)
    windows = parse_windows(fields, source, family, num_layers, unrotated)
    if family.rotates_windows_only and fields.get("sliding_window") is not None:
        unrotated = tuple(layer for layer, window in enumerate(windows) if not window)
    return windows, unrotated


def _parse_unrotated(
    fields: Mapping[str, Any], source: str, family: Family, num_layers: int
) -> tuple[int, ...]:
    """Return the layers without a rotary embedding; `no_rope_layers` has a 0 for each of them."""
    if "no_rope_layers" not in family.implemented:
        return ()
    is_rotated = fields.get("no_rope_layers")
    if is_rotated is None:
        interval = require_int(fields, "no_rope_layer_interval", source)
        is_rotated = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    is_list = isinstance(is_rotated, list) and len(is_rotated) == num_layers
    if not is_list or any(one not in (0, 1) for one in is_rotated):
        raise CheckpointError(
            f"{source}: no_rope_layers must hold 1 (with RoPE) or 0 for each of {num_layers} "
            f"layers, got {is_rotated!r}"
        )
    return tuple(layer for layer, one in enumerate(is_rotated) if not one)


def _is_set(fields: Mapping[str, Any], switch: bool | str) -> bool:  # noqa: FBT001
    """Return a switch of a family, read from its field if it has one."""
    return bool(fields.get(switch, False)) if isinstance(switch, str) else switch


def _parse_heads(
    fields: Mapping[str, Any], source: str, family: Family, latent: LatentConfig | None
) -> tuple[int, int, int]:
    """Return num_heads, num_kv_heads and head_dim."""
    num_heads = require_int(fields, "num_attention_heads", source)
    if latent is not None:
        return num_heads, num_heads, latent.qk_head_dim
    # transformers' default of the other classes is a constant that no real checkpoint relies on.
    if family.is_mha_by_default and fields.get("num_key_value_heads") is None:
        num_kv_heads = num_heads
    else:
        num_kv_heads = require_int(fields, "num_key_value_heads", source)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads = {num_heads} is not a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    if fields.get("head_dim") is None and not family.has_own_head_dim:
        head_dim = require_int(fields, "hidden_size", source) // num_heads
    else:
        head_dim = require_int(fields, "head_dim", source)
    if head_dim % 2:
        raise CheckpointError(f"{source}: head_dim = {head_dim} is odd, which rules out RoPE")
    return num_heads, num_kv_heads, head_dim


def _parse_positions(fields: Mapping[str, Any], source: str) -> int:
    positions = require_int(fields, "max_position_embeddings", source)
    if positions > MAX_POSITIONS:
        raise CheckpointError(
            f"{source}: max_position_embeddings = {positions}, at most {MAX_POSITIONS} is supported"
        )
    return positions


def _parse_epsilon(fields: Mapping[str, Any], source: str) -> float:
    epsilon = fields.get("rms_norm_eps", 1e-6)
    return require_positive(epsilon, f"{source}: rms_norm_eps", hint="; 1e-5 or 1e-6 is usual")


def _parse_dtype(fields: Mapping[str, Any], source: str) -> str:
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"{source}: dtype {name!r} is none of {', '.join(DTYPES)}")
    return name
