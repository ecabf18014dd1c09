"""How positions become angles, as written in config.json. No torch here."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from shared.errors import CheckpointError
from shared.models.config_fields import require_positive


class RopeKind(enum.StrEnum):
    """Scalings of the rotary frequencies that are supported."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"
    """Of a head's pairs (i, i + half) the first ones turn, as if all did."""


# Its angles are the default ones up to token `max_position_embeddings`. No request of a target gets
# past that. A draft may: its RoPE runs to the target's longest context, with the default angles all
# the way, since the keys of a token must not depend on what comes after it.
_DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one model.

    Args:
        theta: Base of the frequencies.
        factor: Context extension; 1 for the default kind and for longrope.
        low_freq_factor, high_freq_factor: llama3 only.
        original_max_position: Context before the extension, tokens; llama3, yarn and longrope.
        attention_factor: What cosines and sines are multiplied by; yarn and longrope.
        mscale_all_dim: By which latent attention scales its scores; yarn.
        beta_fast, beta_slow: Turns within the original context between which yarn blends.
        is_truncated: yarn blends between whole pairs.
        short_factors, long_factors: What longrope divides the frequency of each pair by; the long
            ones if the longest sequence that the engine is configured for exceeds
            `original_max_position`. It is one choice for all requests of an engine, however short:
            a token's keys must not depend on what comes after it.
        rotary_share: Share of each head's values that is rotated, its first ones, or of a
            proportional one's pairs; (0, 1].
        is_interleaved: Pairs are neighbours (2i, 2i + 1), not (i, i + half).
        query_beta: Queries are multiplied by 1 + query_beta * log(1 + position //
            original_max_position).
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotary_share: float = 1.0
    is_interleaved: bool = False
    query_beta: float = 0.0

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many values of a head are rotated."""
        if self.kind is RopeKind.PROPORTIONAL:
            return 2 * int(self.rotary_share * head_dim // 2)
        return int(head_dim * self.rotary_share)


_ORIGINAL = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"
_QUERY_BETA = "llama_4_scaling_beta"
# Kind -> keys of config.json that must be there, and those that may be.
_KEYS: dict[RopeKind, tuple[str, ...]] = {
    RopeKind.DEFAULT: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    RopeKind.YARN: ("factor", _ORIGINAL),
    RopeKind.LONGROPE: ("short_factor", "long_factor", _ORIGINAL),
    RopeKind.PROPORTIONAL: (),
}
_OPTIONAL: dict[RopeKind, tuple[str, ...]] = {
    # transformers fills every key in; the default kind does not read them.
    RopeKind.DEFAULT: _KEYS[RopeKind.LLAMA3],
    RopeKind.LINEAR: (),
    RopeKind.LLAMA3: (),
    RopeKind.YARN: (
        "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"
    ),
    RopeKind.LONGROPE: ("attention_factor", "factor"),
    RopeKind.PROPORTIONAL: ("factor", _SHARE),
}  # fmt: skip
_ALWAYS = ("rope_type", "type", "rope_theta")
_NEUTRAL = {_SHARE: 1.0, "attention_factor": 1.0}


def parse_rope(
    fields: Mapping[str, Any],
    source: str,
    *,
    head_dim: int,
    max_positions: int,
    default_share: float | None = None,
    is_interleaved: bool = False,
    aliases: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
    has_query_scaling: bool = False,
) -> RopeConfig:
    """Read the rotary embedding of a config.json.

    Args:
        fields: The whole config.json: `rope_parameters` (transformers >= 5), or `rope_theta` and
            `rope_scaling` beside it (older files).
        source: File to name in errors.
        head_dim: Values of a head.
        max_positions: max_position_embeddings, tokens.
        default_share: What an absent `partial_rotary_factor` means, if there is no `rotary_dim`
            either, of values; None: there are no such fields.
        is_interleaved: As in RopeConfig.
        aliases: Names that this architecture has for a kind.
        ignored: Keys that change nothing.
        has_query_scaling: `llama_4_scaling_beta` may say how queries grow.
    Raises: CheckpointError naming the field, for a kind or key that is not supported.
    """
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    place = f"{source}: {name}"
    values = _values_of(fields.get(name) or {}, place, ignored)
    kind = _parse_kind(values, place, aliases or {})
    if kind is RopeKind.DEFAULT and _rope_type(values) == _DYNAMIC:
        _check_dynamic({_ORIGINAL: fields.get(_ORIGINAL), **values}, place, max_positions)
    if is_interleaved:
        _check_interleaved(kind, place)
    share = 1.0
    if default_share is not None:
        share = _parse_share(values, fields, source, head_dim, default_share)
        values = {key: value for key, value in values.items() if key != _SHARE}
    elif kind is RopeKind.PROPORTIONAL:
        share = _parse_share_of_pairs(values, place)
    if kind is not RopeKind.DEFAULT and fields.get(_ORIGINAL) is not None:
        values = {**values, _ORIGINAL: fields[_ORIGINAL]}  # it goes first in transformers, too
    growth: dict[str, Any] = {}
    if has_query_scaling:
        growth = _parse_query_scaling(values, place)
        values = {key: value for key, value in values.items() if key != _QUERY_BETA}
    _check_keys(values, kind, place)
    num_pairs = int(head_dim * share) // 2
    return RopeConfig(
        theta=_parse_theta(values, fields, source),
        kind=kind,
        rotary_share=share,
        is_interleaved=is_interleaved,
        **growth
        | _parse_scaling(kind, values, place, max_positions=max_positions, num_pairs=num_pairs),
    )


def _values_of(values: Any, place: str, ignored: Collection[str]) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{place} must be an object, got {values!r}")
    return {key: value for key, value in values.items() if key not in ignored}


def main_rope_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the rotary embedding of layers without a window, where those with one
    have another: `rope_parameters` may hold one of each kind of layer."""
    by_kind = _ropes_by_kind(fields)
    if by_kind is None:
        return fields
    return {**fields, "rope_parameters": by_kind.get("full_attention") or {"rope_type": "default"}}


def local_rope_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the rotary embedding of layers with a window, which is not scaled unless
    `rope_parameters` says so; its base is `rope_local_base_freq`, if there is one."""
    local = (_ropes_by_kind(fields) or {}).get("sliding_attention") or {}
    theta = fields.get("rope_local_base_freq", fields.get("rope_theta"))
    return {
        **fields,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", **local},
        "rope_scaling": None,
    }


def _ropes_by_kind(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    values = fields.get("rope_parameters")
    kinds = {"full_attention", "sliding_attention"}
    return values if isinstance(values, Mapping) and kinds & {*values} else None


def _parse_scaling(
    kind: RopeKind, values: Mapping[str, Any], place: str, *, max_positions: int, num_pairs: int
) -> dict[str, Any]:
    """Return the fields of RopeConfig that a kind reads."""
    number = partial(_number, values, place)
    scaling: dict[str, Any] = {}
    if _ORIGINAL in _KEYS[kind]:
        scaling["original_max_position"] = int(number(_ORIGINAL))
    if kind in (RopeKind.LINEAR, RopeKind.LLAMA3, RopeKind.YARN):
        scaling["factor"] = number("factor")
    if kind is RopeKind.PROPORTIONAL:
        scaling["factor"] = number("factor", 1.0)
    if kind is RopeKind.LLAMA3:
        scaling |= {name: number(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind is RopeKind.YARN:
        truncate = values.get("truncate")
        scaling |= {
            "attention_factor": number("attention_factor", _yarn_attention_factor(values, place)),
            "mscale_all_dim": number("mscale_all_dim") if values.get("mscale_all_dim") else 0.0,
            "beta_fast": number("beta_fast", 32.0),
            "beta_slow": number("beta_slow", 1.0),
            "is_truncated": truncate is None or bool(truncate),
        }
    if kind is RopeKind.LONGROPE:
        original = scaling["original_max_position"]
        factor = number("factor", max_positions / original)
        attention_factor = 1.0
        if factor > 1:
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
        scaling |= {
            "attention_factor": number("attention_factor", attention_factor),
            "short_factors": _numbers(values, place, "short_factor", num_pairs),
            "long_factors": _numbers(values, place, "long_factor", num_pairs),
        }
    return scaling


def _parse_query_scaling(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the fields of RopeConfig that say how queries grow, if they do."""
    if not values.get(_QUERY_BETA):
        return {}
    beta, original = (_number(values, place, name) for name in (_QUERY_BETA, _ORIGINAL))
    return {"query_beta": beta, "original_max_position": int(original)}


def _yarn_attention_factor(values: Mapping[str, Any], place: str) -> float:
    factor = _number(values, place, "factor")

    def scale(share: float) -> float:
        return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        shares = [_number(values, place, name) for name in ("mscale", "mscale_all_dim")]
        return scale(shares[0]) / scale(shares[1])
    return scale(1.0)


def _number(
    values: Mapping[str, Any], place: str, name: str, default: float | None = None
) -> float:
    value = values.get(name)
    if value is None and default is not None:
        return default
    return require_positive(value, f"{place}.{name}")


def _numbers(values: Mapping[str, Any], place: str, name: str, num_pairs: int) -> tuple[float, ...]:
    value = values[name]
    if not isinstance(value, list) or len(value) != num_pairs:
        raise CheckpointError(
            f"{place}.{name} must be a list of {num_pairs} numbers, one for each pair of rotated "
            f"values of a head, got {value!r}"
        )
    return tuple(require_positive(one, f"{place}.{name}") for one in value)


def _parse_share(
    values: Mapping[str, Any],
    fields: Mapping[str, Any],
    source: str,
    head_dim: int,
    default: float,
) -> float:
    """Return the share of a head's values that is rotated."""
    share = values.get(_SHARE, fields.get(_SHARE))
    if share is None and fields.get("rotary_dim") is not None:
        share = require_positive(fields["rotary_dim"], f"{source}: rotary_dim") / head_dim
    share = default if share is None else share
    share = require_positive(share, f"{source}: {_SHARE}")
    if share > 1 or int(head_dim * share) % 2 or int(head_dim * share) == 0:
        raise CheckpointError(
            f"{source}: {_SHARE} = {share} rotates {int(head_dim * share)} of "
            f"{head_dim} values of a head; it must be an even number of them, at least 2"
        )
    return share


def _parse_share_of_pairs(values: Mapping[str, Any], place: str) -> float:
    """Return the share of a head's pairs that a proportional embedding turns."""
    share = _number(values, place, _SHARE, 1.0)
    if share > 1:
        raise CheckpointError(f"{place}.{_SHARE} = {share} must be at most 1")
    return share


def _parse_theta(values: Mapping[str, Any], fields: Mapping[str, Any], source: str) -> float:
    theta = values.get("rope_theta", fields.get("rope_theta"))
    return require_positive(10000.0 if theta is None else theta, f"{source}: rope_theta")


def _check_interleaved(kind: RopeKind, place: str) -> None:
    if kind is RopeKind.PROPORTIONAL:
        raise CheckpointError(
            f"{place} has rope_type {kind}, which is not implemented for pairs of neighbours"
        )


def _rope_type(values: Mapping[str, Any]) -> Any:
    return values.get("rope_type", values.get("type", RopeKind.DEFAULT))


def _check_dynamic(values: Mapping[str, Any], place: str, max_positions: int) -> None:
    """Raise unless the angles are the default ones up to `max_positions`."""
    _number(values, place, "factor")
    original = values.get(_ORIGINAL)
    if original is not None and original != max_positions:
        raise CheckpointError(
            f"{place} has rope_type 'dynamic' from {_ORIGINAL} = {original!r} on: up to "
            f"max_position_embeddings = {max_positions} its angles would depend on how long a "
            "request has become, so that the keys of one token would differ between requests; "
            "write yarn or linear with a fixed factor, or set max_position_embeddings to "
            f"{original}"
        )


def _parse_kind(values: Mapping[str, Any], place: str, aliases: Mapping[str, str]) -> RopeKind:
    name = _rope_type(values)
    if name == _DYNAMIC:
        return RopeKind.DEFAULT
    try:
        return RopeKind(aliases.get(name, name))
    except ValueError:
        kinds = ", ".join((*RopeKind, _DYNAMIC))
        raise CheckpointError(f"{place} has rope_type {name!r}; supported are {kinds}") from None


def _check_keys(values: Mapping[str, Any], kind: RopeKind, place: str) -> None:
    allowed = _KEYS[kind] + _OPTIONAL[kind] + _ALWAYS
    for key, value in values.items():
        if key not in allowed and value is not None and _NEUTRAL.get(key) != value:
            raise CheckpointError(f"{place}.{key} = {value!r} is not supported for {kind}")
    missing = sorted(key for key in _KEYS[kind] if values.get(key) is None)
    if missing:
        raise CheckpointError(f"{place} of kind {kind} lacks {', '.join(missing)}")
