"""Which tools a model may or must call, as a structural tag in the format of its family.

    none, or auto without strict functions    free text; what looks like a call is one
    auto with strict functions                free text; a call that is begun is one of these
    required, or a function by its name       calls alone

Arguments have the function's `parameters` where it is strict, and where a call is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coppice.gateway.constraints import ANY_OBJECT, Constraint, Format, clash, json_format, tag_of
from coppice.gateway.errors import bad_request, unsupported
from coppice.gateway.fields import ChatFields, Function

_HERMES, _LLAMA3, _MISTRAL = "hermes", "llama3", "mistral"
_MARK = "[TOOL_CALLS]"
_NO_CALL = r"([^{<\s].*)?"  # of Llama 3, whose calls are all that there is in an output


def must_call(fields: ChatFields) -> bool:
    """Return whether the output must be calls. Raises: ApiError if it cannot be told."""
    choice = fields.tool_choice
    if choice in ("auto", "none"):
        return False
    if choice != "required":
        _named(fields)
    elif not fields.tools:
        raise bad_request("tool_choice needs tools; give at least one", param="tool_choice")
    return True


def tool_constraint(
    fields: ChatFields, family: str, other: Constraint | None, *, has_args_mark: bool
) -> Constraint | None:
    """Return what a request with tools says of its output; None: it is free.

    Args:
        family: Name of the format of calls.
        other: What else is said of it, by another field: of answers that are no calls.
        has_args_mark: Of mistral: calls are [TOOL_CALLS]name[ARGS]{...}.
    Raises: ApiError.
    """
    is_forced, functions = must_call(fields), _functions(fields)
    if is_forced and other is not None:
        raise clash("tool_choice", other.param)
    if not is_forced and other is None and not any(one.strict for one in functions):
        return None
    schemas = {one.name: _schema(one, is_forced=is_forced) for one in functions}
    is_single = not fields.parallel_tool_calls or isinstance(fields.tool_choice, dict)
    begin, calls, end = _calls(family, schemas, is_single=is_single, has_args_mark=has_args_mark)
    whole: Format = {"type": "sequence", "elements": [_text(begin), calls, _text(end)]}
    if other is not None:
        return tag_of({"type": "or", "elements": [whole, other.format]}, other.param)
    if not is_forced:
        whole = _beside_text(family, begin, calls, end, is_single=is_single)
    return tag_of(whole, "tools")


def _functions(fields: ChatFields) -> list[Function]:
    """Return the functions that may be called. Raises: ApiError."""
    if isinstance(fields.tool_choice, dict):
        return [_named(fields)]
    return [tool.function for tool in fields.tools]


def _named(fields: ChatFields) -> Function:
    """Return the function that tool_choice names. Raises: ApiError."""
    choice = fields.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise unsupported(
            "tool_choice",
            'it may be "auto", "none", "required", or {"type": "function", "function": {"name"}}',
        )
    given = choice.get("function")
    name = given.get("name") if isinstance(given, dict) else None
    for tool in fields.tools:
        if tool.function.name == name:
            return tool.function
    raise bad_request("tool_choice names no function of tools", param="tool_choice")


def _schema(function: Function, *, is_forced: bool) -> Any:
    if not (is_forced or function.strict):
        return ANY_OBJECT
    return function.parameters or {"type": "object", "properties": {}}


def _calls(
    family: str, schemas: dict[str, Any], *, is_single: bool, has_args_mark: bool
) -> tuple[str, Format, str]:
    """Return what stands before the calls of an output, the calls, and what stands behind them."""
    if family == _HERMES:
        tags = _tags(schemas, '<tool_call>\n{{"name": "{}", "arguments": ', "}\n</tool_call>")
        return "", _several(tags, "\n", is_single=is_single), ""
    if family == _LLAMA3:
        tags = _tags(schemas, '{{"name": "{}", "parameters": ', "}")
        return "", _several(tags, "; ", is_single=is_single), ""
    if has_args_mark:
        tags = _tags(schemas, "{}[ARGS]", "")
        return _MARK, _several(tags, _MARK, is_single=is_single), ""
    tags = _tags(schemas, '{{"name": "{}", "arguments": ', "}")
    return f"{_MARK}[", _several(tags, ", ", is_single=is_single), "]"


def _beside_text(family: str, begin: str, calls: Format, end: str, *, is_single: bool) -> Format:
    """Return the format of free text in which a call that is begun is one of these."""
    if family == _LLAMA3:
        return {"type": "or", "elements": [calls, {"type": "regex", "pattern": _NO_CALL}]}
    if family == _MISTRAL:  # nothing follows its calls
        rest: Format = {
            "type": "sequence",
            "elements": [_text(begin.removeprefix(_MARK)), calls, _text(end)],
        }
        return {"type": "dispatch", "rules": [[_MARK, rest]], "loop": False}
    return {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": calls["tags"],
        "stop_after_first": is_single,
    }


def _tags(schemas: dict[str, Any], begin: str, end: str) -> list[Format]:
    return [
        {"type": "tag", "begin": begin.format(name), "content": json_format(schema), "end": end}
        for name, schema in schemas.items()
    ]


def _several(tags: Sequence[Format], separator: str, *, is_single: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}
