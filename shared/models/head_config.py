"""What config.json of an EAGLE or EAGLE-3 head says, in every format of such files. No torch.

Formats: the EAGLE authors' and SpecForge's (fields of the decoder layer at top level, beside them
`eagle_config`), and that of speculators (`speculators_model_type`, the decoder layer in
`transformer_layer_config`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError
from shared.models.config_fields import refuse_fields, require_int
from shared.models.config_file import architecture_of, read_config_json
from shared.models.decoder_config import ModelConfig, parse_model_config


class DraftKind(enum.StrEnum):
    """What drafts the tree; the values are those of `--algorithm`."""

    EAGLE3 = "eagle3"
    EAGLE = "eagle"
    MTP = "mtp"
    FROZEN_KV_MTP = "frozen_kv_mtp"
    STANDALONE = "standalone"


HEAD_ARCHITECTURES = {
    # The EAGLE authors' own files say LlamaForCausalLM; SGLang's and vLLM's say what they are.
    DraftKind.EAGLE3: ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
    DraftKind.EAGLE: ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "LlamaForCausalLM"),
}
SPECULATORS_TYPE = "speculators_model_type"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYER_CONFIG = "transformer_layer_config"
_EAGLE_CONFIG = "eagle_config"
# What a decoder layer in speculators' format calls itself -> the family that it is one of.
_LAYER_FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_USE_AUX_NORM = "use_aux_norm"  # fc_norm as older files call it

_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "parallel_drafting": (False,),
    "hot_vocab_size": (),
}
# ModelOpt's files say that the head is the usual one.
_USUAL_EAGLE_FIELDS: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (0, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureLayers:
    """Which layers of its target a head reads, as its config.json says.

    Args:
        said: As they are written there.
        field: Where they are written.
        is_count: They count the layers before the tap (vLLM, speculators): id i is the output of
            layer i - 1. Else (SpecForge, SGLang) it is that of layer i.
    """

    said: tuple[int, ...]
    field: str
    is_count: bool

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the layers whose outputs are read."""
        return tuple(i - 1 for i in self.said) if self.is_count else self.said

    def __str__(self) -> str:
        meaning = (
            "each the number of layers before the tap, as vLLM and speculators count"
            if self.is_count
            else "each the layer whose output is read, as SpecForge and SGLang count"
        )
        return f"{self.field} {list(self.said)}, {meaning}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """An EAGLE or EAGLE-3 head.

    Args:
        decoder: Its decoder layers; `hidden_size` is the head's own.
        target_hidden_size: Width of one captured layer of the target.
        draft_vocab_size: Rows of the head's own output layer; 0 = the target's layer is used.
        feature_layers: Target layers whose outputs are captured; None = not said.
        has_fc_bias: None = not said, the checkpoint decides.
        has_normed_residual: The residual of the layer begins as the normed hidden state
            (`norm_before_residual`).
        has_tap_norms: Each captured layer has a norm of its own before fc (`fc_norm`).
        has_feature_norm: One norm goes over all of them together before fc (`norm_before_fc`).
        feeds_back_norm: The recurrent hidden state is the normed one (`norm_output`).
    """

    decoder: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int = 0
    feature_layers: FeatureLayers | None = None
    has_fc_bias: bool | None = None
    has_normed_residual: bool = False
    has_tap_norms: bool = False
    has_feature_norm: bool = False
    feeds_back_norm: bool = False

    @classmethod
    def from_checkpoint(cls, directory: Path, kind: DraftKind) -> HeadConfig:
        """Read config.json of a head.

        Args:
            kind: EAGLE3 or EAGLE.
        Raises: CheckpointError naming the field or architecture that is missing or unsupported.
        """
        fields = read_config_json(directory)
        source = f"{directory / 'config.json'}"
        refuse_fields(fields, source, _UNSUPPORTED_FIELDS)
        decoder = _parse_decoder(fields, source, kind)
        has_fc_bias = fields.get("bias")
        if kind is DraftKind.EAGLE:
            refuse_fields(fields, source, dict.fromkeys((*_SWITCHES, _USE_AUX_NORM), (False,)))
            return cls(
                decoder=decoder, target_hidden_size=decoder.hidden_size, has_fc_bias=has_fc_bias
            )
        eagle_config = _parse_eagle_config(fields, source)
        switches = _parse_switches(fields, eagle_config, source)
        draft_vocab_size = fields.get("draft_vocab_size")
        return cls(
            decoder=decoder,
            target_hidden_size=int(fields.get("target_hidden_size") or decoder.hidden_size),
            draft_vocab_size=0
            if draft_vocab_size is None
            else require_int(fields, "draft_vocab_size", source),
            feature_layers=_parse_layers(fields, eagle_config, source),
            has_fc_bias=bool(has_fc_bias),
            has_normed_residual=switches["norm_before_residual"],
            has_tap_norms=switches["fc_norm"],
            has_feature_norm=switches["norm_before_fc"],
            feeds_back_norm=switches["norm_output"],
        )


def speculators_kind(fields: Mapping[str, Any], source: str) -> DraftKind | None:
    """Return the kind of a draft in speculators' format; None: it is in another one.

    Raises: CheckpointError if it is of a kind that is not supported.
    """
    kind = fields.get(SPECULATORS_TYPE)
    if kind is None:
        return None
    if kind != DraftKind.EAGLE3:
        raise CheckpointError(
            f"{source}: {SPECULATORS_TYPE} = {kind!r} is not supported, only "
            f"{str(DraftKind.EAGLE3)!r} is"
        )
    return DraftKind.EAGLE3


def _parse_decoder(fields: Mapping[str, Any], source: str, kind: DraftKind) -> ModelConfig:
    """Parse the decoder layer of a head, which lies where the format says."""
    is_speculators = speculators_kind(fields, source)
    if not is_speculators:
        architecture = architecture_of(fields, source)
        if architecture not in HEAD_ARCHITECTURES[kind]:
            raise CheckpointError(
                f"{source}: architecture {architecture!r} is not supported as an {kind} head; "
                f"supported are {', '.join(HEAD_ARCHITECTURES[kind])}"
            )
        return parse_model_config(fields, source, "LlamaForCausalLM")
    if kind is not is_speculators:
        raise CheckpointError(
            f"{source}: {SPECULATORS_TYPE} = {str(is_speculators)!r}, which is no {kind} head; "
            f"pass --algorithm {is_speculators} or auto"
        )
    layer = fields.get(_LAYER_CONFIG)
    family = layer.get("model_type", "llama") if isinstance(layer, Mapping) else None
    if not isinstance(layer, Mapping) or family not in _LAYER_FAMILIES:
        raise CheckpointError(
            f"{source}: {_LAYER_CONFIG} must be an object of model_type "
            f"{' or '.join(_LAYER_FAMILIES)}, got {layer!r}"
        )
    # Files of compressed-tensors have it at top level.
    quantization = fields.get("quantization_config")
    layer = {**layer, "quantization_config": quantization} if quantization else layer
    source = f"{source}: {_LAYER_CONFIG}"
    decoder = parse_model_config(layer, source, _LAYER_FAMILIES[family])
    kinds = {*(layer.get("layer_types") or ())}
    if kinds == {"sliding_attention"}:  # of Llama, too, which has no windows
        return replace(
            decoder, sliding_window=require_int(layer, "sliding_window", source), layer_windows=()
        )
    if "sliding_attention" in kinds or decoder.layer_windows:
        raise CheckpointError(
            f"{source}: layer_types = {layer.get('layer_types')!r}: all layers of a head must have "
            "the sliding window, or none; a draft plans its attention once"
        )
    return decoder


def _parse_eagle_config(fields: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    eagle_config = fields.get(_EAGLE_CONFIG)
    if eagle_config is None:
        return {}
    source = f"{source}: {_EAGLE_CONFIG}"
    if not isinstance(eagle_config, Mapping):
        raise CheckpointError(f"{source} must be an object, got {eagle_config!r}")
    known = {LAYER_IDS, *_SWITCHES, _USE_AUX_NORM, *_USUAL_EAGLE_FIELDS}
    unknown = sorted(set(eagle_config) - known)
    if unknown:
        raise CheckpointError(f"{source} has unknown fields {', '.join(unknown)}")
    refuse_fields(eagle_config, source, _USUAL_EAGLE_FIELDS)
    return eagle_config


def _parse_switches(
    fields: Mapping[str, Any], eagle_config: Mapping[str, Any], source: str
) -> dict[str, bool]:
    """Return what is normed: each switch lies at top level, or in `eagle_config`."""
    switches: dict[str, bool] = {}
    for place in (fields, eagle_config):
        for name in (*_SWITCHES, _USE_AUX_NORM):
            value = place.get(name)
            if value is None:
                continue
            switch = "fc_norm" if name == _USE_AUX_NORM else name
            if not isinstance(value, bool) or switches.setdefault(switch, value) is not value:
                raise CheckpointError(
                    f"{source}: {name} = {value!r} must be true or false, and the same wherever "
                    f"config.json says it"
                )
    # What vLLM takes an absent field for, which is how these files are served elsewhere.
    switches.setdefault("norm_before_residual", SPECULATORS_TYPE in fields)
    switches = {name: switches.get(name, False) for name in _SWITCHES}
    if switches["fc_norm"] and switches["norm_before_fc"]:
        raise CheckpointError(
            f"{source}: fc_norm and norm_before_fc are both true; a head has one or the other"
        )
    return switches


def _parse_layers(
    fields: Mapping[str, Any], eagle_config: Mapping[str, Any], source: str
) -> FeatureLayers | None:
    """Return which layers are captured; the place of the field says how it counts."""
    found = []
    for place, name, is_count in (
        (fields, LAYER_IDS, True),
        (eagle_config, f"{_EAGLE_CONFIG}.{LAYER_IDS}", False),
    ):
        layer_ids = place.get(LAYER_IDS)
        if layer_ids is None:
            continue
        if not isinstance(layer_ids, list) or not all(type(i) is int for i in layer_ids):
            raise CheckpointError(f"{source}: {name} must be a list of layers, got {layer_ids!r}")
        if layer_ids:
            found.append(FeatureLayers(said=tuple(layer_ids), field=name, is_count=is_count))
    if len({layers.ids for layers in found}) > 1:
        raise CheckpointError(
            f"{source}: {found[0]}, but {found[1]}: they name different layers; remove the one "
            "that the head was not trained with"
        )
    return found[0] if found else None
