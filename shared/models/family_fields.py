"""Fields of config.json that only some families have, or read in their own way. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from shared.errors import CheckpointError
from shared.models.config_fields import require_positive
from shared.models.family import MULTIPLIERS, Family
from shared.models.rope_config import (
    RopeConfig,
    local_rope_fields,
    main_rope_fields,
    parse_rope,
)

_GELU = "gelu_pytorch_tanh"
_MULTIPLIERS = {
    **{name: name for name in MULTIPLIERS},
    "attention_value_scale": "v_multiplier",
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "logits_softcap",
}


def has_gelu(fields: Mapping[str, Any], source: str, family: Family) -> bool:
    """Return whether gates of MLPs and experts pass gelu, approximated by tanh, not silu.

    Raises: CheckpointError naming the field.
    """
    name = fields.get(family.activation_field) or family.ungated or "silu"
    is_clamped = family.experts is not None and family.experts.is_clamped
    allowed: tuple[str, ...] = ("silu", "swish") if is_clamped else ("silu", "swish", _GELU)
    if family.ungated:
        allowed = (family.ungated,)
    if name not in allowed:
        raise CheckpointError(
            f"{source}: {family.activation_field} = {name!r} is not supported, only "
            f"{' and '.join(one for one in allowed if one != 'swish')}"
        )
    return name == _GELU


def parse_multipliers(fields: Mapping[str, Any], source: str, family: Family) -> dict[str, float]:
    """Return the multipliers and soft limits that a family knows, by their names in ModelConfig.

    Raises: CheckpointError naming the field.
    """
    found = {
        name: require_positive(fields[field], f"{source}: {field}")
        for field, name in _MULTIPLIERS.items()
        if field in family.implemented and fields.get(field) is not None
    }
    if "logit_scale" in family.implemented and fields.get("logit_scale") is not None:
        scale = require_positive(fields["logit_scale"], f"{source}: logit_scale")
        found["logits_scaling"] = 1 / scale
    if family.has_query_scalar:
        scalar = fields.get("query_pre_attn_scalar", 256)
        scalar = require_positive(scalar, f"{source}: query_pre_attn_scalar")
        found["attention_multiplier"] = scalar**-0.5
    return found


def parse_ropes(
    fields: Mapping[str, Any],
    source: str,
    family: Family,
    *,
    head_dim: int,
    max_positions: int,
    windows: Sequence[int],
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding, and that of layers with a window, if it is another one.

    Args:
        windows: How many tokens each layer sees; 0 = all.
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
        ignored=family.rope_ignored,
        has_query_scaling=family.has_query_scaling,
    )
    if family.has_rope_alpha:
        fields = _stretched_by_alpha(fields, source, head_dim)
    if family.has_late_qk_norm:  # which undo a factor of all cosines and sines
        return replace(parse(fields), attention_factor=1.0), None
    if not family.has_local_rope:
        return parse(fields), None
    ropes = fields.get("rope_parameters")
    if isinstance(ropes, Mapping) and "rope_theta" in ropes:
        raise CheckpointError(
            f"{source}: rope_parameters.rope_theta leaves open which layers it is for: write "
            "full_attention and sliding_attention into rope_parameters, each with its own"
        )
    main, local = parse(main_rope_fields(fields)), parse(local_rope_fields(fields))
    if all(windows):
        return local, None
    return main, local if any(windows) and local != main else None


def _stretched_by_alpha(fields: Mapping[str, Any], source: str, head_dim: int) -> Mapping[str, Any]:
    """Return the fields of a rotary embedding with its base stretched, if there is an `alpha`.

    Source: arXiv:2309.00071, section 3.1; transformers' modeling_hunyuan_v1_dense.py.
    """
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    values = fields.get(name)
    if not isinstance(values, Mapping) or values.get("alpha") is None:
        return fields
    if values.get("rope_type", values.get("type")) != "dynamic":
        return fields
    theta = values.get("rope_theta", fields.get("rope_theta", 10000.0))
    alpha = require_positive(values["alpha"], f"{source}: {name}.alpha")
    theta = require_positive(theta, f"{source}: rope_theta") * alpha ** (head_dim / (head_dim - 2))
    return {**fields, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
