"""What a draft is, and which rows of its target it reads; ModelConfig is re-exported. No torch.

Conventions of every kind are a table in docs/draft-kinds.md.
"""

from __future__ import annotations

from pathlib import Path

from shared.errors import CheckpointError, ConfigError
from shared.messages import MAX_NUM_STEPS, FeatureSpec
from shared.models.assistant_config import ASSISTANT_ARCHITECTURES, AssistantConfig
from shared.models.checkpoint_names import DEMO, resolve_model, tokenizer_hash
from shared.models.config_file import architecture_of, read_config_json, refuse_architecture
from shared.models.decoder_config import ModelConfig
from shared.models.digest import model_hash
from shared.models.families import FAMILIES
from shared.models.head_config import (
    HEAD_ARCHITECTURES,
    DraftKind,
    FeatureLayers,
    HeadConfig,
    speculators_kind,
)
from shared.models.tensor_files import read_tensor_infos

# If only a target is named, the draft is the bundled one.
_OTHER_DRAFT = (
    "Name one of this target with --draft-model (--model of a draft service), or --draft-model none"
)

__all__ = [
    "DraftKind",
    "HeadConfig",
    "ModelConfig",
    "detect_kind",
    "feature_layers",
    "feature_spec",
    "resolve_draft",
]


def resolve_draft(name: str, algorithm: str, target_dir: Path) -> Path:
    """Return the directory of a draft checkpoint.

    Args:
        name: A directory, or "demo": the bundled head or standalone model; the target itself for
            mtp, whose layers lie there.
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
    fields, source = read_config_json(draft_dir), f"{draft_dir / 'config.json'}"
    speculators = speculators_kind(fields, source)
    if speculators is not None:
        return speculators
    architecture = architecture_of(fields, source)
    refuse_architecture(architecture, source)
    if architecture in ASSISTANT_ARCHITECTURES:
        return DraftKind.FROZEN_KV_MTP
    for kind, architectures in HEAD_ARCHITECTURES.items():
        if architecture in architectures[:2]:
            return kind
    if architecture in FAMILIES and FAMILIES[architecture].has_mtp:
        return DraftKind.MTP
    return _kind_by_tensors(draft_dir)


def _kind_by_tensors(draft_dir: Path) -> DraftKind:
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
        # A layer past the deepest tree would draft nothing.
        if not 1 <= draft.num_mtp_layers <= MAX_NUM_STEPS:
            raise CheckpointError(
                f"{draft_dir / 'config.json'}: num_nextn_predict_layers = {draft.num_mtp_layers}; "
                f"mtp needs a checkpoint with 1 to {MAX_NUM_STEPS} (MiMo, DeepSeek-V3, GLM)"
            )
        _require_equal("hidden_size", draft_dir, draft.hidden_size, target.hidden_size)
        _require_equal("vocab_size", draft_dir, draft.vocab_size, target.vocab_size)
        return kind, FeatureSpec(width=target.hidden_size)
    if kind is DraftKind.FROZEN_KV_MTP:
        return kind, _assistant_spec(draft_dir, target)
    head = HeadConfig.from_checkpoint(draft_dir, kind)
    _require_equal("vocab_size", draft_dir, head.decoder.vocab_size, target.vocab_size)
    if kind is DraftKind.EAGLE:
        _require_equal("hidden_size", draft_dir, head.target_hidden_size, target.hidden_size)
        return kind, FeatureSpec(width=target.hidden_size)
    _require_equal("target_hidden_size", draft_dir, head.target_hidden_size, target.hidden_size)
    layers = feature_layers(draft_dir, head, target)
    layer_ids = layers.ids
    width = len(layer_ids) * target.hidden_size
    if is_projected and head.decoder.hidden_size < width:
        return kind, FeatureSpec(
            layer_ids=layer_ids,
            width=head.decoder.hidden_size,
            projection=model_hash(draft_dir),
        )
    return kind, FeatureSpec(layer_ids=layer_ids, width=width)


def _assistant_spec(draft_dir: Path, target: ModelConfig) -> FeatureSpec:
    """Return what a draft without K and V of its own reads of the target."""
    config = AssistantConfig.from_checkpoint(draft_dir)
    _require_equal("vocab_size", draft_dir, config.decoder.vocab_size, target.vocab_size)
    hidden_size = config.target_hidden_size
    _require_equal("backbone_hidden_size", draft_dir, hidden_size, target.hidden_size)
    layers = config.kv_layout(target).layers
    return FeatureSpec(
        kv_layer_ids=config.kv_layer_ids(target),
        width=sum(shape.num_heads * sum(shape.widths) for shape in layers) + hidden_size,
    )


def feature_layers(draft_dir: Path, head: HeadConfig, target: ModelConfig) -> FeatureLayers:
    """Return which layers of a target an EAGLE-3 head reads.

    Raises: CheckpointError if the target does not have them; it says how they were counted.
    """
    layers = head.feature_layers
    if layers is None:
        # The outputs of these layers are the inputs of layers 2, n / 2 and n - 3.
        default = (1, target.num_layers // 2 - 1, target.num_layers - 4)
        layers = FeatureLayers(said=default, field="default layers", is_count=False)
    if not all(0 <= layer_id < target.num_layers for layer_id in layers.ids):
        raise CheckpointError(
            f"{draft_dir / 'config.json'}: {layers}; these do not lie in the target's "
            f"{target.num_layers} layers"
        )
    return layers


def _require_equal(name: str, draft_dir: Path, draft_value: int, target_value: int) -> None:
    if draft_value != target_value:
        raise CheckpointError(
            f"{draft_dir / 'config.json'}: {name} = {draft_value}, but the target's is "
            f"{target_value}; the draft was made for another target. {_OTHER_DRAFT}"
        )


def _require_same_tokens(draft_dir: Path, target_dir: Path, target: ModelConfig) -> None:
    # Sizes may differ by padding when the tokenizers are known to be the same.
    hashes = tokenizer_hash(draft_dir), tokenizer_hash(target_dir)
    if all(hashes):
        if hashes[0] != hashes[1]:
            raise CheckpointError(
                f"{draft_dir / 'tokenizer.json'} gives ids another meaning than the target's; a "
                f"standalone draft needs the target's tokenizer. {_OTHER_DRAFT}"
            )
        return
    draft = ModelConfig.from_checkpoint(draft_dir)
    _require_equal("vocab_size", draft_dir, draft.vocab_size, target.vocab_size)
