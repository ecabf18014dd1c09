"""Chat messages of OpenAI's API -> what chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from coppice.gateway.errors import ApiError, bad_request, shortened, shown, unsupported

_ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = {
    "system": frozenset({"role", "content", "name"}),
    "developer": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset(
        {"role", "content", "name", "tool_calls", "refusal", "reasoning_content", "reasoning"}
        | {"annotations", "audio", "function_call"}
    ),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
}
# What an answer has besides, and comes back with it when a client sends it again: empty.
_EMPTY_KEYS = frozenset({"annotations", "audio", "function_call"})


def template_messages(
    messages: Sequence[Mapping[str, Any]], *, knows_developer: bool
) -> list[dict[str, Any]]:
    """Return messages as templates take them: texts, and arguments of calls as objects.

    Args:
        knows_developer: The template has the role `developer`; else it is `system`.
    Raises: ApiError that names what cannot be.
    """
    return [
        _message(message, f"messages[{index}]", knows_developer=knows_developer)
        for index, message in enumerate(messages)
    ]


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message that was found right."""
    return _content(message, message["role"], "")


def _message(message: Mapping[str, Any], where: str, *, knows_developer: bool) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise bad_request(
            f"{where}.role is {shown(role)}, expected one of {', '.join(_ROLES)}",
            param=f"{where}.role",
        )
    _check_keys(message, role, where)
    found = {key: value for key, value in message.items() if value is not None}
    for key in _EMPTY_KEYS & found.keys():
        del found[key]
    found["content"] = _content(message, role, where)
    if calls := message.get("tool_calls"):
        found["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    else:
        found.pop("tool_calls", None)
    if role == "developer" and not knows_developer:
        found["role"] = "system"
    return found


def _check_keys(message: Mapping[str, Any], role: str, where: str) -> None:
    for key, value in message.items():
        if key not in _KEYS[role]:
            raise _unknown(f"{where}.{key}")
        if key in _EMPTY_KEYS and value:
            raise unsupported(f"{where}.{key}", "models of text only, and tool_calls for calls")


def _content(message: Mapping[str, Any], role: str, where: str) -> str:
    """Return the text of a message; parts of a text are joined by line ends."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        refusal = message.get("refusal")
        return refusal if isinstance(refusal, str) else ""
    if not isinstance(content, list) or not content:
        raise bad_request(
            f"{where}.content must be a string or a list of parts", param=f"{where}.content"
        )
    return "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise unsupported(f"{where}.type", f"it is {shown(kind)}; models of text only")
    text = part.get(kind)
    if not isinstance(text, str) or part.keys() > {"type", kind}:
        raise bad_request(f"{where} must have {kind!r} and nothing else", param=where)
    return text


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_request(f"{where} must be a list", param=where)
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} must have a function with a name", param=where)
    for key in call.keys() - {"id", "type", "function", "index"}:
        raise _unknown(f"{where}.{key}")
    for key in function.keys() - {"name", "arguments"}:
        raise _unknown(f"{where}.function.{key}")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise bad_request(
                f"{where}.function.arguments is no JSON", param=f"{where}.function.arguments"
            ) from None
    kept = {key: value for key, value in call.items() if key != "index"}
    return {**kept, "type": "function", "function": {**function, "arguments": arguments}}


def _unknown(path: str) -> ApiError:
    path = shortened(path)
    message = f"unrecognized request argument: {path}"
    return bad_request(message, param=path, code="unknown_parameter")
