"""Reading config.json and generation_config.json: files, architectures, ids that end a text.

No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError
from shared.models.refused_families import REFUSED


def read_config_json(directory: Path) -> dict[str, Any]:
    """Return the fields of a checkpoint's config.json.

    Raises: CheckpointError when there is none, or it is not a JSON object.
    """
    return _read_json(directory / "config.json")


def refuse_architecture(architecture: str, source: str) -> None:
    """Raise for an architecture that is known, and that nothing here computes.

    Raises: CheckpointError naming what it has.
    """
    if architecture in REFUSED:
        raise CheckpointError(
            f"{source}: architecture {architecture!r} is not supported: it has "
            f"{REFUSED[architecture]}; docs/families.md lists what is"
        )


def architecture_of(fields: Mapping[str, Any], source: str) -> str:
    """Return the one architecture that a config.json names."""
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f"{source}: architectures must name one class, got {names!r}")
    return names[0]


def read_eos_token_ids(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text; generation_config.json goes before config.json.

    Raises: CheckpointError naming the file, when one of them is no id of the vocabulary.
    """
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        fields = _read_json(path) if path.exists() else {}
        text = fields.get("text_config") or {}
        value = fields.get("eos_token_id", text.get("eos_token_id"))
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
                raise CheckpointError(
                    f"{path}: eos_token_id must be an id, or a list of ids, from 0 to "
                    f"{vocab_size - 1}, the last one of the vocabulary; got {value!r}"
                )
            return tuple(ids)
    return ()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; expected a Hugging Face checkpoint directory"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return fields
