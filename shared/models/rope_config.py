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


# Key of config.json -> the RopeConfig field that the key fills, and its type.
_FIELDS: dict[str, tuple[str, type[Any]]] = {
    "factor": ("factor", float),
    "low_freq_factor": ("low_freq_factor", float),
    "high_freq_factor": ("high_freq_factor", float),
    "original_max_position_embeddings": ("original_max_position", int),
}
_KEYS: dict[RopeKind, tuple[str, ...]] = {
    RopeKind.DEFAULT: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.LLAMA3: tuple(_FIELDS),
}
# transformers fills every key in; the default kind does not read them.
_ALLOWED = _KEYS | {RopeKind.DEFAULT: tuple(_FIELDS)}
_ALWAYS = ("rope_type", "type", "rope_theta")
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
    kind = _parse_kind(values, f"{source}: {name}")
    _check_keys(values, kind, f"{source}: {name}")
    theta = _parse_theta(values.get("rope_theta", fields.get("rope_theta")), source)
    scaling = {_FIELDS[key][0]: _FIELDS[key][1](values[key]) for key in _KEYS[kind]}
    return RopeConfig(theta=theta, kind=kind, **scaling)


def _parse_kind(values: Mapping[str, Any], place: str) -> RopeKind:
    name = values.get("rope_type", values.get("type", RopeKind.DEFAULT))
    try:
        return RopeKind(name)
    except ValueError:
        kinds = ", ".join(RopeKind)
        raise CheckpointError(f"{place} has rope_type {name!r}; supported are {kinds}") from None


def _check_keys(values: Mapping[str, Any], kind: RopeKind, place: str) -> None:
    allowed = _ALLOWED[kind] + _ALWAYS
    for key, value in values.items():
        if key not in allowed and value is not None and _NEUTRAL.get(key) != value:
            raise CheckpointError(f"{place}.{key} = {value!r} is not supported for {kind}")
    missing = sorted(key for key in _KEYS[kind] if values.get(key) is None)
    if missing:
        raise CheckpointError(f"{place} of kind {kind} lacks {', '.join(missing)}")


def _parse_theta(theta: Any, source: str) -> float:
    theta = 10000.0 if theta is None else theta
    if not isinstance(theta, int | float) or not theta > 0:
        raise CheckpointError(f"{source}: rope_theta must be a positive number, got {theta!r}")
    return float(theta)
