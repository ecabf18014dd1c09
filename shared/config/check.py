"""Refuse a configuration that cannot work, with the fix in the message; needs no weights."""

from __future__ import annotations

import re
from dataclasses import Field, fields
from typing import Any

from shared.errors import ConfigError, InvalidArgumentError
from shared.messages import MAX_NUM_STEPS, MAX_TOPK, TreeShape, check_shape

# What SGLang calls the algorithms that have another name here.
CHOICE_SYNONYMS = {"nextn": "mtp"}


def flag_name(field_name: str) -> str:
    """Return the command-line flag of a field."""
    return "--" + field_name.replace("_", "-")


def normalize_choice(spec: Field[Any], value: str) -> str:
    """Return a choice in lower case, SGLang's names translated; other strings as they are."""
    if not spec.metadata["choices"]:
        return value
    lower = value.lower()
    return CHOICE_SYNONYMS.get(lower, lower)


def check_config(config: Any) -> None:
    """Raise ConfigError, naming the flag, if a field of a configuration dataclass cannot work."""
    for spec in fields(config):
        _check_field(spec, getattr(config, spec.name))
    values = {spec.name: getattr(config, spec.name) for spec in fields(config)}
    if "device" in values and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", values["device"]):
        raise ConfigError(f"--device is {values['device']!r}, expected auto, cpu, cuda or cuda:N")
    if "warm_up_trees" in values:
        parse_shapes(values["warm_up_trees"])
    if "num_draft_tokens" in values:
        check_tree_shape(values["num_steps"], values["topk"], values["num_draft_tokens"])


def check_tree_shape(num_steps: int, topk: int, num_draft_tokens: int) -> None:
    """Raise ConfigError if no tree has this shape; 0 = still to be chosen, so it always fits."""
    shape = TreeShape(
        num_steps=num_steps or MAX_NUM_STEPS,
        topk=topk or MAX_TOPK,
        num_draft_tokens=num_draft_tokens or 2,
    )
    try:
        check_shape(shape, prefix="")
    except InvalidArgumentError as error:
        raise ConfigError(f"{flag_name(error.field)}: {error.message}") from error


def parse_shape(text: str) -> TreeShape:
    """Parse a tree shape like 5/8/32.

    Raises: ConfigError if it is none, or no tree has it.
    """
    parts = text.strip().split("/")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"{text!r} is no tree shape, expected steps/topk/nodes as in 5/8/32")
    num_steps, topk, num_draft_tokens = map(int, parts)
    check_tree_shape(num_steps, topk, num_draft_tokens)
    return TreeShape(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)


def parse_shapes(text: str) -> list[TreeShape]:
    """Parse shapes with commas between them; none is fine, one with a 0 (= auto) is left out.

    Raises: ConfigError.
    """
    parts = [part for part in text.split(",") if part.strip()]
    return [parse_shape(part) for part in parts if not re.search(r"\b0\b", part)]


def _check_field(spec: Field[Any], value: Any) -> None:
    flag, metadata = flag_name(spec.name), spec.metadata
    choices, minimum, maximum = metadata["choices"], metadata["minimum"], metadata["maximum"]
    if choices and value not in choices:
        raise ConfigError(f"{flag} is {value!r}, expected one of {', '.join(choices)}")
    # Written so that NaN fails too.
    if minimum is not None and not value >= minimum:
        raise ConfigError(f"{flag} is {value}, expected at least {minimum}")
    if maximum is not None and not value <= maximum:
        raise ConfigError(f"{flag} is {value}, expected at most {maximum}")
