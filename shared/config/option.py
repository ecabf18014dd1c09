"""Declare a field of a configuration: its default, help text and limits."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare a configuration field.

    Args:
        default: Its type is the option's type: str, int, float or bool.
        help: Help text of the flag.
        choices: The values that a str may have, lower case.
        minimum: Smallest number allowed.
        maximum: Largest number allowed.
        aliases: More flags for the same field: SGLang's names.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "choices": choices,
            "minimum": minimum,
            "maximum": maximum,
            "aliases": aliases,
        },
    )


def option_of(config_type: type, name: str, **changed: Any) -> Any:
    """Declare an option of another configuration once more.

    Args:
        name: Of the field there.
        changed: Arguments of `option` that are others here.
    """
    spec = next(spec for spec in fields(config_type) if spec.name == name)
    return option(**{"default": spec.default, **spec.metadata, **changed})
