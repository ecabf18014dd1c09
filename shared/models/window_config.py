"""Which layers of a model see a sliding window only, as written in config.json. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import CheckpointError
from shared.models.config_fields import require_int
from shared.models.families import Family, Window

_LAYER_TYPES = ("full_attention", "sliding_attention")
# Of transformers' classes that read `max_window_layers`.
_MAX_WINDOW_LAYERS = 28


def parse_windows(
    fields: Mapping[str, Any],
    source: str,
    family: Family,
    num_layers: int,
    unrotated_layers: Sequence[int],
) -> tuple[int, ...]:
    """Return how many tokens each layer sees, its own included; 0 = all.

    Args:
        fields: The whole config.json, the family's defaults included.
        source: File to name in errors.
        unrotated_layers: Layers without a rotary embedding.
    Raises: CheckpointError naming the field.
    """
    is_windowed = _windowed_layers(fields, source, family, num_layers, unrotated_layers)
    if not any(is_windowed):
        return (0,) * num_layers
    window = require_int(fields, "sliding_window", source)
    return tuple(window if one else 0 for one in is_windowed)


def _windowed_layers(
    fields: Mapping[str, Any],
    source: str,
    family: Family,
    num_layers: int,
    unrotated_layers: Sequence[int],
) -> list[bool]:
    when, layers, layer_types = family.window, range(num_layers), fields.get("layer_types")
    if layer_types is not None and when not in (Window.NEVER, Window.IF_USED_BY_ALL):
        return _parse_layer_types(layer_types, source, num_layers)
    is_used = when in (Window.IF_SET, Window.PATTERN) or bool(fields.get("use_sliding_window"))
    if when is Window.NEVER or fields.get("sliding_window") is None or not is_used:
        return [False] * num_layers
    first = fields.get("max_window_layers", _MAX_WINDOW_LAYERS)
    match when:
        case Window.IF_USED:
            return [first is not None and layer >= first for layer in layers]
        case Window.IF_USED_EVEN:
            return [first is not None and layer < first and layer % 2 == 0 for layer in layers]
        case Window.IF_USED_UNROTATED:
            return [layer in unrotated_layers for layer in layers]
        case Window.PATTERN:
            period = _parse_period(fields, source, family)
            return [(layer + 1) % period != 0 for layer in layers]
    return [True] * num_layers


def _parse_layer_types(layer_types: Any, source: str, num_layers: int) -> list[bool]:
    """Return which layers have a sliding window."""
    is_list = isinstance(layer_types, list) and len(layer_types) == num_layers
    if not is_list or any(kind not in _LAYER_TYPES for kind in layer_types):
        raise CheckpointError(
            f"{source}: layer_types must hold full_attention or sliding_attention for each of "
            f"{num_layers} layers, got {layer_types!r}"
        )
    return [kind == "sliding_attention" for kind in layer_types]


def _parse_period(fields: Mapping[str, Any], source: str, family: Family) -> int:
    """Return how many layers there are from one that sees everything to the next."""
    name, hint = "sliding_window_pattern", "; or write layer_types, which says it of each layer"
    return require_int({name: family.window_period, **fields}, name, source, hint=hint)
