"""Embeddings that each layer has of its own, as written in config.json. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import CheckpointError
from shared.models.config_fields import require_int


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerConfig:
    """A table of embeddings of which each layer has a part.

    Args:
        vocab_size: Its rows.
        width: Values of a token for one layer.
    """

    vocab_size: int
    width: int


def parse_per_layer(fields: Mapping[str, Any], source: str) -> PerLayerConfig | None:
    """Return what each layer reads of every token; None: nothing.

    Args:
        fields: The whole config.json, the family's defaults included.
        source: File to name in errors.
    Raises: CheckpointError naming the field.
    """
    name = "hidden_size_per_layer_input"
    if fields.get(name) in (None, 0):
        return None
    width, vocab_size = require_int(fields, name, source), require_int(fields, "vocab_size", source)
    num_rows = require_int(fields, "vocab_size_per_layer_input", source)
    if num_rows < vocab_size:
        raise CheckpointError(
            f"{source}: vocab_size_per_layer_input = {num_rows} must be at least vocab_size = "
            f"{vocab_size}: tokens past it would have no embeddings per layer"
        )
    return PerLayerConfig(vocab_size=num_rows, width=width)
