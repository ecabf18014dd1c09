"""Layers that attend to K and V of layers before them, as written in config.json. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shared.errors import CheckpointError

if TYPE_CHECKING:
    from shared.models.decoder_config import ModelConfig


def with_shared_kv(
    config: ModelConfig, fields: Mapping[str, Any], source: str, windows: Sequence[int]
) -> ModelConfig:
    """Return a config whose last `num_kv_shared_layers` layers have no K and V: each attends to
    those of the last layer of its kind, with a window or without, that has some.

    Args:
        source: File to name in errors.
        windows: How many tokens each layer sees; 0 = all.
    Raises: CheckpointError naming the field.
    """
    count = fields.get("num_kv_shared_layers") or 0
    place = f"{source}: num_kv_shared_layers = {count!r}"
    if type(count) is not int or not 0 <= count < len(windows):
        raise CheckpointError(f"{place} must be from 0 to {len(windows) - 1}, all layers but one")
    if count == 0:
        return config
    first = len(windows) - count
    last = {window: layer_id for layer_id, window in enumerate(windows[:first])}
    for layer_id in range(first, len(windows)):
        if windows[layer_id] not in last:
            kind = "sliding_attention" if windows[layer_id] else "full_attention"
            raise CheckpointError(
                f"{place} leaves layer {layer_id} no K and V to attend to: by layer_types it is "
                f"{kind}, and none of the first {first} layers is"
            )
    config = replace(
        config, kv_layers=(*range(first), *(last[window] for window in windows[first:]))
    )
    _check_heads(config, place)
    if not fields.get("use_double_wide_mlp"):
        return config
    size = config.intermediate_size
    return replace(config, layer_intermediate_sizes=(size,) * first + (2 * size,) * count)


def _check_heads(config: ModelConfig, place: str) -> None:
    """Raise unless layers attend to K and V of such heads as they have."""
    for layer_id in range(config.num_layers):
        own, shape = config.at_layer(layer_id), config.cache_shape(layer_id)
        if (own.num_kv_heads, own.head_dim, own.v_dim) != (shape.num_heads, *shape.widths):
            raise CheckpointError(
                f"{place} lets layer {layer_id} attend to K and V of layer "
                f"{config.kv_layer(layer_id)}, which has num_key_value_heads = {shape.num_heads} "
                f"and head_dim = {shape.width}; its own are {own.num_kv_heads} and {own.head_dim}"
            )
