"""Fields of config.json that only some families have, or read in their own way. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from shared.errors import CheckpointError
from shared.models.config_fields import require_positive
from shared.models.families import Family
from shared.models.rope_config import (
    RopeConfig,
    local_rope_fields,
    main_rope_fields,
    parse_rope,
)

_GELU = "gelu_pytorch_tanh"
_SOFTCAPS = {
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "logits_softcap",
}


def has_gelu(fields: Mapping[str, Any], source: str, family: Family) -> bool:
    """Return whether gates of MLPs pass gelu, approximated by tanh, not silu.

    Raises: CheckpointError naming the field.
    """
    name = fields.get(family.activation_field) or "silu"
    allowed = ("silu", "swish") if family.experts else ("silu", "swish", _GELU)
    if name not in allowed:
        raise CheckpointError(
            f"{source}: {family.activation_field} = {name!r} is not supported, only "
            f"{' and '.join(one for one in allowed if one != 'swish')}"
        )
    return name == _GELU


def parse_softcaps(fields: Mapping[str, Any], source: str, family: Family) -> dict[str, float]:
    """Return the soft limits that a family knows, by their fields of ModelConfig.

    Raises: CheckpointError naming the field.
    """
    return {
        name: require_positive(fields[field], f"{source}: {field}")
        for field, name in _SOFTCAPS.items()
        if field in family.implemented and fields.get(field) is not None
    }


def parse_ropes(
    fields: Mapping[str, Any], source: str, family: Family, *, head_dim: int, max_positions: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding, and that of layers with a window, if it is another one.

    Raises: CheckpointError naming the field.
    """
    parse = partial(
        parse_rope,
        source=source,
        head_dim=head_dim,
        max_positions=max_positions,
        default_share=family.rotary_share,
        is_interleaved=family.is_interleaved,
        aliases=family.rope_aliases,
        ignored=family.rope_of_images,
    )
    if not family.has_local_rope:
        return parse(fields), None
    ropes = fields.get("rope_parameters")
    if isinstance(ropes, Mapping) and "rope_theta" in ropes:
        raise CheckpointError(
            f"{source}: rope_parameters.rope_theta leaves open which layers it is for: write "
            "full_attention and sliding_attention into rope_parameters, each with its own"
        )
    main, local = parse(main_rope_fields(fields)), parse(local_rope_fields(fields))
    return main, local if local != main else None


def query_multiplier(fields: Mapping[str, Any], source: str) -> float:
    """Return what scores are multiplied by where `query_pre_attn_scalar` says it.

    Raises: CheckpointError naming the field.
    """
    scalar = fields.get("query_pre_attn_scalar", 256)
    return require_positive(scalar, f"{source}: query_pre_attn_scalar") ** -0.5
