"""How positions become angles, as written in config.json. No torch here."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import CheckpointError


class RopeKind(enum.StrEnum):
    """Scalings of the rotary frequencies that are supported."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one model.

    Args:
        theta: Base of the frequencies.
        factor: Context extension; 1 for the default kind.
        low_freq_factor, high_freq_factor, original_max_position: llama3 only.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


_KEYS = {
    RopeKind.DEFAULT: set(),
    RopeKind.LINEAR: {"factor"},
    RopeKind.LLAMA3: {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}
_ALWAYS = {"rope_type", "type", "rope_theta"}
_NEUTRAL = {"partial_rotary_factor": 1.0, "attention_factor": 1.0}


def parse_rope(fields: Mapping[str, Any], source: str) -> RopeConfig:
    """Read the rotary embedding of a config.json.

    Args:
        fields: The whole config.json: `rope_parameters` (transformers >= 5), or `rope_theta` and
            `rope_scaling` beside it (older files).
        source: File to name in errors.
    Raises: CheckpointError naming the field, for a kind or key that is not supported.
    """
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    values = fields.get(name) or {}
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{source}: {name} must be an object, got {values!r}")
    kind_name = values.get("rope_type", values.get("type", RopeKind.DEFAULT))
    try:
        kind = RopeKind(kind_name)
    except ValueError:
        kinds = ", ".join(RopeKind)
        raise CheckpointError(
            f"{source}: {name} has rope_type {kind_name!r}; supported are {kinds}"
        ) from None
    for key, value in values.items():
        if key in _ALWAYS or key in _KEYS[kind] or value is None or _NEUTRAL.get(key) == value:
            continue
        if kind is RopeKind.DEFAULT and key in _KEYS[RopeKind.LLAMA3]:
            continue  # transformers fills them in; the default kind does not read them
        raise CheckpointError(f"{source}: {name}.{key} = {value!r} is not supported for {kind}")
    missing = sorted(key for key in _KEYS[kind] if values.get(key) is None)
    if missing:
        raise CheckpointError(f"{source}: {name} of kind {kind} lacks {', '.join(missing)}")
    theta = values.get("rope_theta", fields.get("rope_theta"))
    theta = 10000.0 if theta is None else theta
    if not isinstance(theta, int | float) or not theta > 0:
        raise CheckpointError(f"{source}: rope_theta must be a positive number, got {theta!r}")
    if kind is RopeKind.DEFAULT:
        return RopeConfig(theta=float(theta))
    if kind is RopeKind.LINEAR:
        return RopeConfig(theta=float(theta), kind=kind, factor=float(values["factor"]))
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=float(values["factor"]),
        low_freq_factor=float(values["low_freq_factor"]),
        high_freq_factor=float(values["high_freq_factor"]),
        original_max_position=int(values["original_max_position_embeddings"]),
    )
