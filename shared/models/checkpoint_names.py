"""Find a checkpoint by the name that a user gives, and say what its token ids mean. No torch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

from shared.errors import CheckpointError
from shared.models import hub

DEMO = "demo"
BUNDLED_ROLES = ("target", "eagle3", "standalone")
_HINT = "pass a Hugging Face checkpoint directory, a name on the Hub (org/name) or 'demo'"


def resolve_model(name: str, role: str) -> Path:
    """Return the directory of a checkpoint.

    Args:
        name: A directory; "demo" for the bundled model; `org/name` or `org/name@revision` for one
            on the Hugging Face Hub, which is downloaded if it is not cached.
        role: Which bundled model: "target", "eagle3" or "standalone".
    Raises: CheckpointError when there is no checkpoint.
    """
    if name == DEMO:
        assert role in BUNDLED_ROLES, f"no bundled model is called {role!r}"
        spec = importlib.util.find_spec("coppice")
        assert spec is not None and spec.submodule_search_locations, "coppice is not installed"
        directory = Path(spec.submodule_search_locations[0]) / "bundled" / role
    elif hub.is_hub_name(name):
        directory = hub.fetch(name)
    else:
        directory = Path(name).expanduser()
    _check_directory(directory)
    return directory


def check_local_model(name: str) -> None:
    """Raise unless a model that needs no download is there; loads and downloads nothing.

    Args:
        name: As of `resolve_model`; names on the Hub and "demo" are taken to be right.
    Raises: CheckpointError when there is no checkpoint.
    """
    if name != DEMO and not hub.is_hub_name(name):
        _check_directory(Path(name).expanduser())


def _check_directory(directory: Path) -> None:
    if not directory.exists():
        raise CheckpointError(f"there is no directory {directory}; {_HINT}")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} holds no config.json; {_HINT}")


def tokenizer_hash(directory: Path) -> str:
    """Return a fingerprint of what every token id means; "" without a tokenizer.json.

    Covers the vocabulary and the added tokens, not the merges, templates or padding: two models
    with equal hashes mean the same text by the same ids.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return ""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        vocab = fields["model"]["vocab"]
        added = [[token["id"], token["content"]] for token in fields.get("added_tokens") or []]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a tokenizers file: {error!r}") from error
    text = json.dumps([vocab, sorted(added)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
