"""Keywords that say what an output must be -> StructuredOutput."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from coppice.v1 import generation_pb2 as pb
from shared.errors import InvalidArgumentError

CONSTRAINTS = ("json_schema", "regex", "ebnf", "choice", "structural_tag")


def structured_output(options: Mapping[str, Any]) -> pb.StructuredOutput | None:
    """Return the message of a request's keywords; None: its output is free.

    Args:
        options: As of RequestOptions; others than CONSTRAINTS are left alone.
    Raises: InvalidArgumentError that names the keyword.
    """
    given = [name for name in CONSTRAINTS if options.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidArgumentError(
            f"{given[0]} and {given[1]} both say what the output must be; give one of them",
            field=given[1],
        )
    (name,) = given
    value = options[name]
    if name == "choice":
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise _wrong(name, "a list of texts", value)
        if not all(isinstance(text, str) for text in value):
            raise _wrong(name, "a list of texts", value)
        return pb.StructuredOutput(choice=pb.Choices(texts=value))
    if name in ("regex", "ebnf"):
        if not isinstance(value, str):
            raise _wrong(name, "a text", value)
        return pb.StructuredOutput(**{name: value})  # type: ignore[arg-type]
    return pb.StructuredOutput(**{name: _json_of(name, value)})  # type: ignore[arg-type]


def _json_of(name: str, value: Any) -> str:
    """Return the JSON text of a schema or of a structural tag."""
    if isinstance(value, str):
        return value
    if name == "json_schema" and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if not isinstance(value, Mapping | bool):
        kinds = "a dict or its JSON"
        raise _wrong(name, f"{kinds}, or a pydantic model" if "schema" in name else kinds, value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{name} cannot be JSON: {error}", field=name) from None


def _wrong(name: str, wanted: str, value: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{name} must be {wanted}, and is {type(value).__name__}", field=name
    )
