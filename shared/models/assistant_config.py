"""What config.json of a draft says that has no K and V of its own. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError
from shared.kv.layout import KVLayout
from shared.models.config_fields import refuse_fields, require_int
from shared.models.config_file import read_config_json
from shared.models.decoder_config import ModelConfig, parse_model_config
from shared.models.families import FAMILIES

ASSISTANT_ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
# What its layers call themselves -> the family that they are of.
_LAYER_FAMILIES = {
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
}
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "use_double_wide_mlp": (False,),
    "hidden_size_per_layer_input": (0,),
}
_REASONS = {
    "use_double_wide_mlp": "MLPs would be twice as wide",
    "hidden_size_per_layer_input": "layers would read embeddings of their own of each token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Clusters of equally many tokens, of which a row proposes those of some.

    Args:
        num_chosen: How many clusters; those whose centroids a row's hidden state is closest to.
    """

    num_clusters: int
    num_chosen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantConfig:
    """A draft whose layers have queries only, and attend to K and V of two layers of its target.

    Args:
        decoder: Its layers. A row sees its window's tokens and one more: its own has no K and V.
        target_hidden_size: Values of the target's hidden state and embedding.
        clusters: Of tokens; None: a row proposes any token.
        source: config.json, for messages.
    """

    decoder: ModelConfig
    target_hidden_size: int
    clusters: ClusterConfig | None
    source: str

    @property
    def cache_of_layer(self) -> tuple[int, ...]:
        """Return whose K and V each layer attends to: 0, those of a layer with a window; 1, of one
        without.
        """
        return tuple(int(window == 0) for window in self.decoder.layer_windows)

    @classmethod
    def from_checkpoint(cls, directory: Path) -> AssistantConfig:
        """Read config.json of a Gemma 4 assistant.

        Raises: CheckpointError naming the field that is missing or unsupported.
        """
        fields, source = read_config_json(directory), f"{directory / 'config.json'}"
        text = fields.get("text_config")
        if not isinstance(text, dict) or text.get("model_type") not in _LAYER_FAMILIES:
            raise CheckpointError(
                f"{source}: text_config must be an object of model_type "
                f"{' or '.join(_LAYER_FAMILIES)}, got {text!r}"
            )
        place = f"{source}: text_config"
        family = _LAYER_FAMILIES[text["model_type"]]
        refuse_fields({**FAMILIES[family].defaults, **text}, place, _REFUSED, _REASONS)
        num_layers = require_int(text, "num_hidden_layers", place)
        if text.get("num_kv_shared_layers") not in (None, 0, num_layers):
            raise CheckpointError(
                f"{place}.num_kv_shared_layers = {text['num_kv_shared_layers']!r} must be "
                f"num_hidden_layers = {num_layers}: no layer has K and V of its own"
            )
        tied = fields.get("tie_word_embeddings", True)
        dtype = fields.get("dtype") or text.get("dtype")
        own = {"num_kv_shared_layers": 0, "tie_word_embeddings": tied, "dtype": dtype}
        decoder = parse_model_config({**text, **own}, place, family)
        windows = decoder.layer_windows or (decoder.sliding_window,) * num_layers
        seen = tuple(window and window + 1 for window in windows)
        return cls(
            decoder=replace(decoder, has_own_kv=False, layer_windows=seen, sliding_window=0),
            target_hidden_size=require_int(fields, "backbone_hidden_size", source),
            clusters=_parse_clusters(fields, source, decoder.vocab_size),
            source=source,
        )

    def kv_layer_ids(self, target: ModelConfig) -> tuple[int, int]:
        """Return the layers of a target whose K and V it reads: those that the target's last layer
        with a window attends to, and its last one without.

        Raises: CheckpointError if the target has no such layers, or their heads are others.
        """
        windows = target.layer_windows
        if target.latent is not None or not windows:
            raise CheckpointError(
                f"{self.source}: the draft attends to K and V of a layer with a window and of one "
                "without, and the target does not have both; name the target that it was made for"
            )
        last = len(windows) - 1
        by_kind = [
            last - next(i for i, window in enumerate(reversed(windows)) if (window == 0) is is_full)
            for is_full in (False, True)
        ]
        by_kind = [target.kv_layer(layer_id) for layer_id in by_kind]
        for layer_id, cache in enumerate(self.cache_of_layer):
            own = self.decoder.at_layer(layer_id)
            has = target.cache_shape(by_kind[cache])
            if (own.num_kv_heads, own.head_dim, own.head_dim) != (has.num_heads, *has.widths):
                raise CheckpointError(
                    f"{self.source}: layer {layer_id} has num_key_value_heads = "
                    f"{own.num_kv_heads} and head_dim = {own.head_dim}, but layer "
                    f"{by_kind[cache]} of the target, whose K and V it would read, has "
                    f"{has.num_heads} and {has.width}; the draft was made for another target"
                )
        return by_kind[0], by_kind[1]

    def kv_layout(self, target: ModelConfig) -> KVLayout:
        """Return the caches of the two layers that it keeps a copy of."""
        return KVLayout(layers=tuple(map(target.cache_shape, self.kv_layer_ids(target))))


def _parse_clusters(
    fields: Mapping[str, Any], source: str, vocab_size: int
) -> ClusterConfig | None:
    """Return the clusters of tokens that `use_ordered_embeddings` asks for."""
    if not fields.get("use_ordered_embeddings"):
        return None
    count = require_int(fields, "num_centroids", source, default=2048)
    chosen = require_int(fields, "centroid_intermediate_top_k", source, default=32)
    if vocab_size % count or chosen > count:
        raise CheckpointError(
            f"{source}: num_centroids = {count} must divide vocab_size = {vocab_size}, and "
            f"centroid_intermediate_top_k = {chosen} must not be more"
        )
    return ClusterConfig(num_clusters=count, num_chosen=chosen)
