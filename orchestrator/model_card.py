"""What clients are told of the model: its name, and what a checkpoint says of chats.

A checkpoint has its chat templates in `chat_template.jinja` and `additional_chat_templates/`, or in
`tokenizer_config.json`; the former go first, as in transformers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.access.watched_file import read_text_file

logger = logging.getLogger(__name__)

DEFAULT_TEMPLATE = "default"
_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Of the served model.

    Args:
        chat_templates: Jinja templates by name; empty: the checkpoint has none.
        special_tokens: Texts of named tokens, such as bos_token.
        started_s: When this process was started, seconds since 1970.
    """

    name: str
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    started_s: int


def read_model_card(
    directory: Path, *, name: str, started_s: float, chat_template: str = ""
) -> ModelCard:
    """Read what a checkpoint says of chats.

    Args:
        name: What clients call the model.
        chat_template: File with a template in the place of the checkpoint's; empty: none.
    Raises: ConfigError if that file cannot be read.
    """
    config = _read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # an older checkpoint
        config = {**config, **_read_json(directory / "special_tokens_map.json")}
    templates = _template_files(directory) or _templates_of(config.get("chat_template"))
    if chat_template:
        templates = {DEFAULT_TEMPLATE: read_text_file(chat_template, option="--chat-template")}
    return ModelCard(
        name=name,
        chat_templates=templates,
        special_tokens=_special_tokens(config),
        started_s=int(started_s),
    )


def _template_files(directory: Path) -> dict[str, str]:
    """Return the templates that are files of their own."""
    found = {
        path.name.removesuffix(".jinja"): path
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    if (directory / "chat_template.jinja").is_file():
        found[DEFAULT_TEMPLATE] = directory / "chat_template.jinja"
    return {name: path.read_text(encoding="utf-8") for name, path in found.items()}


def _templates_of(value: Any) -> dict[str, str]:
    """Return the templates of a configuration: one, or a list of named ones."""
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, list):
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    return {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of named tokens; a token is its text or an object with a `content`."""
    found = {}
    for name in (f"{kind}_token" for kind in _NAMED_TOKENS):
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object of a file; empty if there is none, or it is broken, which is logged."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("cannot read %s, no chat template: %s", path, error)
        return {}
    return value if isinstance(value, dict) else {}
