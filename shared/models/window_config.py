"""Which layers of a model see a sliding window only, as written in config.json. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.models.config_fields import require_int, require_kinds
from shared.models.family import Family, Window

_ALWAYS_USED = (Window.IF_SET, Window.PATTERN, Window.PATTERN_FROM_FULL)
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
    if family.requires_window:
        require_int(fields, "sliding_window", source)
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
    when = family.window
    if when not in (Window.NEVER, Window.IF_USED_BY_ALL):
        kinds = require_kinds(fields, "layer_types", source, _LAYER_TYPES, num_layers)
        if kinds is not None:
            return [kind == "sliding_attention" for kind in kinds]
    is_used = when in _ALWAYS_USED or bool(fields.get("use_sliding_window"))
    if when is Window.NEVER or fields.get("sliding_window") is None or not is_used:
        return [False] * num_layers
    return _layers_by_rule(fields, source, family, num_layers, unrotated_layers)


def _layers_by_rule(
    fields: Mapping[str, Any],
    source: str,
    family: Family,
    num_layers: int,
    unrotated_layers: Sequence[int],
) -> list[bool]:
    """Return which layers have a sliding window that is used, where no list says so."""
    layers, first = range(num_layers), fields.get("max_window_layers", _MAX_WINDOW_LAYERS)
    match family.window:
        case Window.IF_USED:
            return [first is not None and layer >= first for layer in layers]
        case Window.IF_USED_EVEN:
            return [first is not None and layer < first and layer % 2 == 0 for layer in layers]
        case Window.IF_USED_UNROTATED:
            return [layer in unrotated_layers for layer in layers]
        case Window.PATTERN:
            period = _parse_period(fields, source, family)
            return [(layer + 1) % period != 0 for layer in layers]
        case Window.PATTERN_FROM_FULL:
            return [layer % family.window_period != 0 for layer in layers]
    return [True] * num_layers


def _parse_period(fields: Mapping[str, Any], source: str, family: Family) -> int:
    """Return how many layers there are from one that sees everything to the next."""
    name, hint = "sliding_window_pattern", "; or write layer_types, which says it of each layer"
    return require_int({name: family.window_period, **fields}, name, source, hint=hint)
