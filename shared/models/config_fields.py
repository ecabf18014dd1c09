"""Checks of single fields of a config.json. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from shared.errors import CheckpointError


def require_int(
    fields: Mapping[str, Any], name: str, source: str, *, default: int | None = None, hint: str = ""
) -> int:
    """Return a field that must be a positive integer; the default, if there is one, of none."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or value <= 0:
        raise CheckpointError(f"{source}: {name} must be a positive integer, got {value!r}{hint}")
    return value


def require_positive(value: Any, name: str, *, hint: str = "") -> float:
    """Return a field that must be a finite number above 0. Raises: CheckpointError naming it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:  # written so that NaN fails too
        raise CheckpointError(f"{name} must be a finite number > 0, got {value!r}{hint}")
    return float(value)


def require_kinds(
    fields: Mapping[str, Any], name: str, source: str, kinds: tuple[str, ...], num_layers: int
) -> list[str] | None:
    """Return a field that must name one of `kinds` for each layer; None: there is none."""
    value = fields.get(name)
    if value is None:
        return None
    is_list = isinstance(value, list) and len(value) == num_layers
    if not is_list or any(kind not in kinds for kind in value):
        raise CheckpointError(
            f"{source}: {name} must hold {' or '.join(kinds)} for each of {num_layers} layers, "
            f"got {value!r}"
        )
    return value


def refuse_fields(
    fields: Mapping[str, Any],
    source: str,
    unsupported: Mapping[str, tuple[Any, ...]],
    reasons: Mapping[str, str] | None = None,
) -> None:
    """Raise for a field whose value asks for something that is not implemented.

    Args:
        unsupported: Field -> values, besides None, that ask for nothing.
        reasons: Field -> what it asks for, where the name does not say it.
    Raises: CheckpointError naming the field.
    """
    for name, neutral in unsupported.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            reason = f": {reasons[name]}" if reasons and name in reasons else ""
            raise CheckpointError(f"{source}: {name} = {value!r} is not supported{reason}")


def require_one_of(
    fields: Mapping[str, Any], source: str, name: str, supported: tuple[Any, ...], *, hint: str
) -> None:
    """Raise unless a field has one of the values that are supported.

    Raises: CheckpointError naming the field.
    """
    value = fields.get(name)
    if value not in supported:
        shown = ", ".join(repr(one) for one in supported if one is not None) or "none"
        raise CheckpointError(f"{source}.{name} = {value!r} is not supported, only {shown}: {hint}")


def compressed_groups(
    config: Mapping[str, Any], source: str, *, hint: str
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the groups of a quantization_config of compressed-tensors: name, group, its weights.

    Raises: CheckpointError naming the field of what is not supported in any such file.
    """
    # It rotates inputs of projections.
    require_one_of(config, source, "transform_config", (None, {}), hint=hint)
    sparsity = config.get("sparsity_config")
    if sparsity:
        place = f"{source}.sparsity_config"
        require_one_of(sparsity, place, "format", (None, "dense"), hint=hint)
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{source}.config_groups must be an object with a group of weights")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            place = f"{source}.config_groups.{name}.weights"
            raise CheckpointError(f"{place} must be an object, got {weights!r}")
        yield name, group, weights
