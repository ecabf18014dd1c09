"""The fields of a language model by the names that all families have, refused ones refused.

No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import CheckpointError
from shared.models.config_fields import refuse_fields
from shared.models.family import Family
from shared.models.refused_families import REFUSED_FIELDS
from shared.models.window_heads import with_usual_names

# Field -> the values, besides None, that leave the computation as it is implemented.
_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "compression_config": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "kv_lora_rank": (0,),
    "attention_sinks": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "attention_value_scale": (1.0,),
    "partial_rotary_factor": (1.0,),
    "no_rope_layers": ((), []),
    "clip_qkv": (),
    "alibi": (False,),
    "is_causal": (True,),
}


def variant_of(family: Family, fields: Mapping[str, Any]) -> Family:
    """Return what a family is for the language model of a config.json."""
    kind = _kind_of(fields)
    return next((one for one in family.variants if kind in one.text_types), family)


def language_fields(fields: Mapping[str, Any], source: str, family: Family) -> dict[str, Any]:
    """Return the fields of a family's language model by the names that all families have, absent
    ones by their defaults.

    Raises: CheckpointError naming a field that asks for what is not implemented.
    """
    if family.text_types:
        fields = _text_fields(fields, source, family)
    if family.has_window_heads:
        fields = with_usual_names(fields, source, family.window_period)
    if family.layer_lists:
        fields = {**fields, **_of_all_layers(fields, source, family.layer_lists)}
    computed = family.computed_fields
    refused = {k: v for k, v in _UNSUPPORTED_FIELDS.items() if k not in computed}
    refuse_fields(
        {**family.defaults, **fields}, source, {**refused, **family.refused}, REFUSED_FIELDS
    )
    renamed = {name: fields[other] for name, other in family.other_names.items() if other in fields}
    return {**family.defaults, **renamed, **fields}


def _text_fields(fields: Mapping[str, Any], source: str, family: Family) -> dict[str, Any]:
    """Return the fields of the language model in the config.json of one that sees, too."""
    text = fields.get("text_config")
    if text is None and family.has_flat_text:
        return dict(fields)
    if not isinstance(text, Mapping) or _kind_of(fields) not in (None, *family.text_types):
        kinds = [kind for one in (family, *family.variants) for kind in one.text_types]
        raise CheckpointError(
            f"{source}: text_config must be an object of model_type "
            f"{' or '.join(map(repr, kinds))}, got {text!r}"
        )
    is_tied = fields.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    said = {name: value for name, value in text.items() if value is not None or name not in fields}
    tying = {} if is_tied is None else {"tie_word_embeddings": is_tied}
    return {**fields, **said, **tying}


def _of_all_layers(
    fields: Mapping[str, Any], source: str, names: tuple[str, ...]
) -> dict[str, Any]:
    """Return the one value of fields that have a value for each layer.

    Raises: CheckpointError naming the field whose values differ.
    """
    found = {}
    for name in names:
        values = fields.get(name)
        if isinstance(values, list):
            if not values or any(value != values[0] for value in values):
                raise CheckpointError(
                    f"{source}: {name} = {values!r} is not supported: all layers must have the same"
                )
            found[name] = values[0]
    return found


def _kind_of(fields: Mapping[str, Any]) -> Any:
    """Return the `model_type` that `text_config` says; None: it says none."""
    text = fields.get("text_config")
    return text.get("model_type") if isinstance(text, Mapping) else None
