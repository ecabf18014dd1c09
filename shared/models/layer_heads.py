"""K/V heads of layers that differ in them, as written in config.json. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.errors import CheckpointError
from shared.models.config_fields import require_int

_DEFAULT_GLOBAL_HEAD_DIM = 512
_OVERRIDES = ("head_dim", "num_key_value_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHeads:
    """The heads of one layer.

    Args:
        head_dim: Values of a head of Q and K.
        v_head_dim: Of one of V; None: as many.
        has_k_as_v: V is what K's projection returns, before K's norm and rotary embedding.
        has_sinks: Heads of Q have attention sinks, if the model has any.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    has_k_as_v: bool = False
    has_sinks: bool = True


def parse_layer_heads(
    fields: Mapping[str, Any],
    source: str,
    windows: Sequence[int],
    usual: LayerHeads,
) -> tuple[LayerHeads, ...]:
    """Return the heads of each layer; empty: all layers have the usual ones.

    Layers without a window have heads of `global_head_dim` and, with `attention_k_eq_v`,
    `num_global_key_value_heads` of them; or `per_layer_config` says it layer by layer, as
    transformers writes it.

    Args:
        source: File to name in errors.
        windows: How many tokens each layer sees; 0 = all.
        usual: Of layers of which nothing else is said.
    Raises: CheckpointError naming the field.
    """
    if windows[-1]:
        raise CheckpointError(
            f"{source}: layer_types must end with full_attention, as it does in the class that "
            "computes it, whatever config.json says"
        )
    has_k_as_v = bool(fields.get("attention_k_eq_v"))
    overrides = _overrides_by_layer(fields, source, windows)
    layers = []
    for layer_id, window in enumerate(windows):
        said, place = overrides.get(layer_id, {}), f"{source}: layer {layer_id}"
        heads = replace(
            usual,
            num_kv_heads=require_int(
                said, "num_key_value_heads", place, default=usual.num_kv_heads
            ),
            head_dim=require_int(said, "head_dim", place, default=usual.head_dim),
            has_k_as_v=has_k_as_v and not window,
        )
        layers.append(checked_heads(heads, place))
    return () if set(layers) == {usual} else tuple(layers)


def checked_heads(heads: LayerHeads, place: str) -> LayerHeads:
    """Return the heads of a layer that can be computed.

    Args:
        place: File and layer to name in errors.
    Raises: CheckpointError naming the field.
    """
    if heads.head_dim % 2 or heads.num_heads % heads.num_kv_heads:
        raise CheckpointError(
            f"{place} has head_dim = {heads.head_dim}, which must be even for RoPE, and "
            f"num_key_value_heads = {heads.num_kv_heads}, of which num_attention_heads = "
            f"{heads.num_heads} must be a multiple"
        )
    if heads.v_head_dim is not None and (heads.v_head_dim % 2 or heads.v_head_dim > heads.head_dim):
        raise CheckpointError(
            f"{place} has v_head_dim = {heads.v_head_dim}; it must be even, and at most head_dim = "
            f"{heads.head_dim}: kernels store halves of heads in blocks of K's width"
        )
    return heads


def _overrides_by_layer(
    fields: Mapping[str, Any], source: str, windows: Sequence[int]
) -> dict[int, Mapping[str, Any]]:
    """Return which of `_OVERRIDES` each layer has of its own."""
    listed = fields.get("per_layer_config")
    if listed is None:
        said = {"head_dim": fields.get("global_head_dim", _DEFAULT_GLOBAL_HEAD_DIM)}
        if fields.get("attention_k_eq_v"):
            said["num_key_value_heads"] = fields.get("num_global_key_value_heads")
        return {layer_id: said for layer_id, window in enumerate(windows) if not window}
    layer_ids = {str(layer_id): layer_id for layer_id in range(len(windows))}
    if not isinstance(listed, Mapping) or not {*listed} <= {*layer_ids}:
        raise CheckpointError(
            f'{source}: per_layer_config must be an object whose keys are layers, "0" to '
            f'"{len(windows) - 1}", got {listed!r}'
        )
    for name, said in listed.items():
        if not isinstance(said, Mapping) or not {*said} <= {*_OVERRIDES}:
            raise CheckpointError(
                f"{source}: per_layer_config of layer {name} may have {' and '.join(_OVERRIDES)} "
                f"alone, got {said!r}"
            )
    return {layer_ids[name]: said for name, said in listed.items()}
