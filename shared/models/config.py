"""What a draft is, and which rows of its target it reads; ModelConfig is re-exported. No torch.

Conventions of every kind are a table in docs/draft-kinds.md.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError, ConfigError
from shared.messages import FeatureSpec
from shared.models.checkpoint import (
    DEMO,
    read_tensor_infos,
    resolve_model,
    tokenizer_hash,
)
from shared.models.decoder_config import (
    ModelConfig,
    architecture_of,
    parse_model_config,
    read_config_json,
    refuse_fields,
    require_int,
)
from shared.models.digest import model_hash
from shared.models.families import FAMILIES

__all__ = [
    "DraftKind",
    "HeadConfig",
    "ModelConfig",
    "detect_kind",
    "feature_spec",
    "resolve_draft",
]


class DraftKind(enum.StrEnum):
    """What drafts the tree; the values are those of `--algorithm`."""

    EAGLE3 = "eagle3"
    EAGLE = "eagle"
    MTP = "mtp"
    STANDALONE = "standalone"


_HEAD_ARCHITECTURES = {
    # The EAGLE authors' own files say LlamaForCausalLM; SGLang's and vLLM's say what they are.
    DraftKind.EAGLE3: ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
    DraftKind.EAGLE: ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "LlamaForCausalLM"),
}
_UNSUPPORTED_HEAD_FIELDS: dict[str, tuple[Any, ...]] = {
    "norm_before_residual": (False,),
    "norm_before_fc": (False,),
    "fc_norm": (False,),
    "use_aux_norm": (False,),
    "parallel_drafting": (False,),
    "hot_vocab_size": (),
}
_EAGLE_CONFIG_KEYS = {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "norm_before_fc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """An EAGLE or EAGLE-3 head.

    Args:
        decoder: Its decoder layer; `hidden_size` is the head's own.
        target_hidden_size: Width of one captured layer of the target.
        draft_vocab_size: Rows of the head's own output layer; 0 = the target's layer is used.
        feature_layer_ids: Target layers whose outputs are captured; None = not said.
        has_fc_bias: None = not said, the checkpoint decides.
        feeds_back_norm: The recurrent hidden state is the normed one (`norm_output`).
    """

    decoder: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int = 0
    feature_layer_ids: tuple[int, ...] | None = None
    has_fc_bias: bool | None = None
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
        architecture = architecture_of(fields, source)
        if architecture not in _HEAD_ARCHITECTURES[kind]:
            raise CheckpointError(
                f"{source}: architecture {architecture!r} is not supported as an {kind} head; "
                f"supported are {', '.join(_HEAD_ARCHITECTURES[kind])}"
            )
        refuse_fields(fields, source, _UNSUPPORTED_HEAD_FIELDS)
        decoder = parse_model_config(fields, source, "LlamaForCausalLM")
        has_fc_bias = fields.get("bias")
        if kind is DraftKind.EAGLE:
            return cls(
                decoder=decoder, target_hidden_size=decoder.hidden_size, has_fc_bias=has_fc_bias
            )
        if decoder.num_layers != 1:
            raise CheckpointError(
                f"{source}: num_hidden_layers = {decoder.num_layers}; an eagle3 head has 1"
            )
        draft_vocab_size = fields.get("draft_vocab_size")
        return cls(
            decoder=decoder,
            target_hidden_size=int(fields.get("target_hidden_size") or decoder.hidden_size),
            draft_vocab_size=0
            if draft_vocab_size is None
            else require_int(fields, "draft_vocab_size", source),
            feature_layer_ids=_parse_layer_ids(fields, source),
            has_fc_bias=bool(has_fc_bias),
            feeds_back_norm=bool(fields.get("norm_output", False)),
        )


def _parse_layer_ids(fields: Mapping[str, Any], source: str) -> tuple[int, ...] | None:
    eagle_config = fields.get("eagle_config")
    if eagle_config is None:
        return None
    if not isinstance(eagle_config, Mapping):
        raise CheckpointError(f"{source}: eagle_config must be an object, got {eagle_config!r}")
    unknown = sorted(set(eagle_config) - _EAGLE_CONFIG_KEYS)
    if unknown:
        raise CheckpointError(f"{source}: eagle_config has unknown fields {', '.join(unknown)}")
    refuse_fields(
        eagle_config,
        f"{source}: eagle_config",
        {"use_aux_hidden_state": (True,), "norm_before_fc": (False,)},
    )
    layer_ids = eagle_config.get("eagle_aux_hidden_state_layer_ids")
    if layer_ids is None:
        return None
    if not isinstance(layer_ids, list) or not all(isinstance(i, int) for i in layer_ids):
        raise CheckpointError(
            f"{source}: eagle_aux_hidden_state_layer_ids must be a list of layers, "
            f"got {layer_ids!r}"
        )
    return tuple(layer_ids) or None


def resolve_draft(name: str, algorithm: str, target_dir: Path) -> Path:
    """Return the directory of a draft checkpoint.

    Args:
        name: A directory, or "demo": the bundled head or standalone model; the target itself for
            mtp, whose layer lies there.
        algorithm: "auto" or a DraftKind.
    """
    if name == DEMO and algorithm == DraftKind.MTP:
        return target_dir
    role = "standalone" if algorithm == DraftKind.STANDALONE else "eagle3"
    return resolve_model(name, role)


def detect_kind(draft_dir: Path, algorithm: str) -> DraftKind:
    """Return what kind of draft a checkpoint is.

    Args:
        algorithm: "auto": the architecture says, or for the many heads that call themselves
            LlamaForCausalLM the tensors; else a DraftKind, which is believed.
    """
    if algorithm != "auto":
        try:
            return DraftKind(algorithm)
        except ValueError:
            raise ConfigError(
                f"algorithm {algorithm!r} is none of auto, {', '.join(DraftKind)}"
            ) from None
    architecture = architecture_of(read_config_json(draft_dir), f"{draft_dir / 'config.json'}")
    for kind, architectures in _HEAD_ARCHITECTURES.items():
        if architecture in architectures[:2]:
            return kind
    if architecture in FAMILIES and FAMILIES[architecture].has_mtp:
        return DraftKind.MTP
    names = {name.removeprefix("model.") for name in read_tensor_infos(draft_dir)}
    if "fc.weight" not in names:
        return DraftKind.STANDALONE
    has_hidden_norm = any(name.endswith(".hidden_norm.weight") for name in names)
    return DraftKind.EAGLE3 if has_hidden_norm else DraftKind.EAGLE


def feature_spec(
    draft_dir: Path, target_dir: Path, algorithm: str, *, is_projected: bool = False
) -> tuple[DraftKind, FeatureSpec]:
    """Return a draft's kind and what it reads of the target; the dtype is left "".

    Args:
        algorithm: "auto" or a DraftKind.
        is_projected: The target applies an EAGLE-3 head's fc, where that makes rows narrower.
    Raises: CheckpointError when the two checkpoints do not fit each other, naming the field.
    """
    kind = detect_kind(draft_dir, algorithm)
    target = ModelConfig.from_checkpoint(target_dir)
    if kind is DraftKind.STANDALONE:
        _require_same_tokens(draft_dir, target_dir, target)
        return kind, FeatureSpec()
    if kind is DraftKind.MTP:
        draft = ModelConfig.from_checkpoint(draft_dir)
        if draft.num_mtp_layers != 1:
            raise CheckpointError(
                f"{draft_dir / 'config.json'}: num_nextn_predict_layers = {draft.num_mtp_layers}; "
                "mtp needs a checkpoint with 1 (MiMo, DeepSeek-V3, GLM-4.5)"
            )
        _require_equal("hidden_size", draft_dir, draft.hidden_size, target.hidden_size)
        _require_equal("vocab_size", draft_dir, draft.vocab_size, target.vocab_size)
        return kind, FeatureSpec(width=target.hidden_size)
    head = HeadConfig.from_checkpoint(draft_dir, kind)
    _require_equal("vocab_size", draft_dir, head.decoder.vocab_size, target.vocab_size)
    if kind is DraftKind.EAGLE:
        _require_equal("hidden_size", draft_dir, head.target_hidden_size, target.hidden_size)
        return kind, FeatureSpec(width=target.hidden_size)
    _require_equal("target_hidden_size", draft_dir, head.target_hidden_size, target.hidden_size)
    layer_ids = head.feature_layer_ids
    if layer_ids is None:
        # The outputs of these layers are the inputs of layers 2, n / 2 and n - 3.
        layer_ids = (1, target.num_layers // 2 - 1, target.num_layers - 4)
    outside = [layer_id for layer_id in layer_ids if not 0 <= layer_id < target.num_layers]
    if outside:
        raise CheckpointError(
            f"{draft_dir / 'config.json'}: eagle_aux_hidden_state_layer_ids {list(layer_ids)} do "
            f"not lie in the target's {target.num_layers} layers"
        )
    width = len(layer_ids) * target.hidden_size
    if is_projected and head.decoder.hidden_size < width:
        return kind, FeatureSpec(
            layer_ids=layer_ids,
            width=head.decoder.hidden_size,
            projection=model_hash(draft_dir),
        )
    return kind, FeatureSpec(layer_ids=layer_ids, width=width)


def _require_equal(name: str, draft_dir: Path, draft_value: int, target_value: int) -> None:
    if draft_value != target_value:
        raise CheckpointError(
            f"{draft_dir / 'config.json'}: {name} = {draft_value}, but the target's is "
            f"{target_value}; the draft was made for another target"
        )


def _require_same_tokens(draft_dir: Path, target_dir: Path, target: ModelConfig) -> None:
    # Sizes may differ by padding when the tokenizers are known to be the same.
    hashes = tokenizer_hash(draft_dir), tokenizer_hash(target_dir)
    if all(hashes):
        if hashes[0] != hashes[1]:
            raise CheckpointError(
                f"{draft_dir / 'tokenizer.json'} gives ids another meaning than the target's; a "
                "standalone draft needs the target's tokenizer"
            )
        return
    draft = ModelConfig.from_checkpoint(draft_dir)
    _require_equal("vocab_size", draft_dir, draft.vocab_size, target.vocab_size)
