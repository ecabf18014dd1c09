"""StructuredOutput of a request -> Grammar: what cannot be one is refused here, by its field.

Whether a grammar can be compiled is found out by shared/grammar/compiler.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from coppice.v1 import generation_pb2 as pb
from orchestrator.json_schema import follow
from orchestrator.patterns import problem_of
from shared.errors import InvalidArgumentError
from shared.grammar.source import Grammar, GrammarKind

MAX_SOURCE_BYTES = 1 << 18
_FIELD = "structured_output"
_MAX_DEPTH = 500
_KINDS = {
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "ebnf": GrammarKind.EBNF,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}


def parse_grammar(message: pb.GenerateRequest) -> Grammar | None:
    """Return the grammar of a request's output; None: it is free.

    Raises: InvalidArgumentError naming the field to blame.
    """
    if not message.HasField("structured_output"):
        return None
    name = message.structured_output.WhichOneof("constraint")
    if name is None:
        raise InvalidArgumentError(
            "structured_output says nothing; set json_schema, regex, ebnf, choice or "
            "structural_tag, or leave it out",
            field=_FIELD,
        )
    field = f"{_FIELD}.{name}"
    for clash in ("ignore_eos", "min_new_tokens"):
        if getattr(message.stopping, clash):
            raise InvalidArgumentError(
                f"{clash} does not go with {field}: the grammar says where the output may end; "
                "leave it out",
                field=f"stopping.{clash}",
            )
    if name == "choice":
        kind, source = GrammarKind.EBNF, _ebnf_of(message.structured_output.choice.texts)
    else:
        kind, source = _KINDS[name], getattr(message.structured_output, name)
    if not source:
        raise InvalidArgumentError(f"{field} is empty", field=field)
    num_bytes = len(source.encode())
    if num_bytes > MAX_SOURCE_BYTES:
        raise InvalidArgumentError(
            f"{field} has {num_bytes} bytes, at most {MAX_SOURCE_BYTES} are allowed", field=field
        )
    return Grammar(kind=kind, source=_followed(kind, source, field))


def _followed(kind: GrammarKind, source: str, field: str) -> str:
    """Return a source that is followed exactly. Raises: InvalidArgumentError if none would be."""
    if kind is GrammarKind.EBNF:
        return source
    if kind is GrammarKind.REGEX:
        _check_pattern(source, field)
        return source
    try:
        value = json.loads(source, parse_constant=_no_number)
        if not isinstance(value, dict | bool):
            raise InvalidArgumentError(f"{field} is no JSON object", field=field)
        if kind is GrammarKind.JSON_SCHEMA:
            follow(value, field)
        else:
            _follow_parts(value, field)
        followed = json.dumps(value, ensure_ascii=False)
        followed.encode()
    except RecursionError:
        raise _too_deep(field) from None
    except ValueError as error:
        raise InvalidArgumentError(f"{field} is not JSON: {error}", field=field) from None
    return followed


def _follow_parts(value: Any, field: str, depth: int = 0) -> None:
    """Write the schemas in a structural tag so that they are followed, and check its patterns."""
    if depth > _MAX_DEPTH:
        raise _too_deep(field)
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            _follow_parts(part, field, depth + 1)
    if isinstance(value, dict) and value.get("type") in ("json_schema", "qwen_xml_parameter"):
        follow(value.get("json_schema"), field)
    if isinstance(value, dict) and value.get("type") == "regex":
        _check_pattern(str(value.get("pattern")), field)


def _too_deep(field: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field} is nested too deeply", field=field)


def _check_pattern(pattern: str, field: str) -> None:
    if problem := problem_of(pattern, is_in_json=False):
        raise InvalidArgumentError(
            f"{field} cannot be followed: {problem}", reason="INVALID_GRAMMAR", field=field
        )


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _ebnf_of(texts: Sequence[str]) -> str:
    """Return the grammar of one of these texts."""
    field = f"{_FIELD}.choice.texts"
    if not texts:
        raise InvalidArgumentError(f"{field} is empty; name at least one", field=field)
    if not all(texts):
        raise InvalidArgumentError(f"{field} has an empty text", field=field)
    # A JSON string is a string of the notation as well; other letters than ASCII stay as they are.
    literals = [json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts)]
    return f"root ::= {' | '.join(literals)}"
