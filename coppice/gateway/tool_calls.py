"""Tool calls out of the text, in the formats that models of the large families write.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number (Qwen, Hermes)
    llama3    {"name": ..., "parameters": {...}}, the whole answer; several with ";" between them
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}

A call is told when it is whole. What looks like one and is none (no JSON, an unknown function) is
text like any other: nothing that the model wrote is lost.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from coppice.gateway.chat_template import ChatTemplate
from coppice.gateway.reasoning import overlap

# Templates of Mistral take ids of nine letters and digits only; others take anything.
_ID_CHARS, _ID_LEN = string.ascii_letters + string.digits, 9
_SPECIAL_MARKS = frozenset({"llama3", "mistral"})
_FAMILY_MARKS = {"mistral": "[TOOL_CALLS]", "hermes": "<tool_call>", "llama3": "<|python_tag|>"}
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_LLAMA_HINT = '"parameters"'


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model asks for.

    Args:
        arguments: JSON text of an object.
    """

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text has brought."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


def tool_format(parser: str, template: ChatTemplate) -> str:
    """Return the name of a model's format, "none" if it is not known.

    Args:
        parser: A name, or "auto": as the template says.
    """
    if parser != "auto":
        return parser
    for name, mark in _FAMILY_MARKS.items():
        if template.mentions(mark):
            return name
    return "llama3" if template.mentions(_LLAMA_HINT) else "none"


def needs_special_tokens(name: str) -> bool:
    """Return whether the marks of a format are special tokens, which must be spelled."""
    return name in _SPECIAL_MARKS


def tool_parser(name: str, functions: Iterable[str]) -> ToolParser:
    """Return a parser of one output.

    Args:
        name: Of the format.
        functions: Names that may be called.
    """
    return _PARSERS[name](frozenset(functions))


class ToolParser(ABC):
    """Takes the text of an output in pieces."""

    def __init__(self, functions: frozenset[str]) -> None:
        self._functions = functions
        self._held = ""

    @abstractmethod
    def feed(self, text: str) -> Parsed:
        """Return what is known now."""

    @abstractmethod
    def flush(self) -> Parsed:
        """Return what was held back, at the end of the output."""

    def _call_of(self, value: Any) -> ToolCall | None:
        """Return the call that a JSON value says; None: it says none."""
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._functions:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # some models quote them
            arguments = _loads(arguments)
        text = _dumps(arguments) if isinstance(arguments, dict) else ""
        if not text:
            return None
        return ToolCall(
            call_id="".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LEN)),
            name=name,
            arguments=text,
        )


class _Hermes(ToolParser):
    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self, functions: frozenset[str]) -> None:
        super().__init__(functions)
        self._is_inside = False
        self._is_after_call = False

    def feed(self, text: str) -> Parsed:
        self._held += text
        said: list[str] = []
        calls: list[ToolCall] = []
        while self._step(said, calls):
            pass
        return Parsed("".join(said), tuple(calls))

    def flush(self) -> Parsed:
        held, self._held = self._held, ""
        if not self._is_inside:
            return Parsed(self._between(held))
        call = self._call_of(_loads(held))  # the model left out the last mark
        return Parsed(calls=(call,)) if call else Parsed(self.BEGIN + held)

    def _step(self, said: list[str], calls: list[ToolCall]) -> bool:
        """Go on to the next mark; return whether there was one."""
        mark = self.END if self._is_inside else self.BEGIN
        before, found, rest = self._held.partition(mark)
        while found and self._is_inside and _ends_in_string(before):
            more, found, rest = rest.partition(mark)
            before += mark + more
        if not found:
            if not self._is_inside:
                num_held = overlap(self._held, mark)
                size = len(self._held) - num_held
                said.append(self._between(self._held[:size]))
                self._held = self._held[size:]
            return False
        if self._is_inside:
            call = self._call_of(_loads(before))
            if call is None:
                said.append(self.BEGIN + before + self.END)
            else:
                calls.append(call)
                self._is_after_call = True
        else:
            said.append(self._between(before))
        self._held, self._is_inside = rest, not self._is_inside
        return True

    def _between(self, text: str) -> str:
        """Return text between calls: the line ends there belong to the format."""
        if self._is_after_call and not text.strip():
            return ""
        self._is_after_call = False if text else self._is_after_call
        return text


class _Llama3(ToolParser):
    TAG = "<|python_tag|>"

    def __init__(self, functions: frozenset[str]) -> None:
        super().__init__(functions)
        self._is_text = False

    def feed(self, text: str) -> Parsed:
        if self._is_text:
            return Parsed(text)
        self._held += text
        start = self._held.lstrip()
        if not start or start[0] == "{" or start.startswith(self.TAG) or self.TAG.startswith(start):
            return Parsed()
        self._is_text = True
        held, self._held = self._held, ""
        return Parsed(held)

    def flush(self) -> Parsed:
        held, self._held = self._held, ""
        values = _split_values(held.strip().removeprefix(self.TAG), separator=";")
        calls = tuple(map(self._call_of, values))
        whole = tuple(call for call in calls if call is not None)
        return Parsed(calls=whole) if whole and len(whole) == len(calls) else Parsed(held)


class _Mistral(ToolParser):
    MARK, ARGS = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self, functions: frozenset[str]) -> None:
        super().__init__(functions)
        self._is_inside = False

    def feed(self, text: str) -> Parsed:
        self._held += text
        if self._is_inside:
            return Parsed()
        before, mark, rest = self._held.partition(self.MARK)
        if mark:
            self._is_inside, self._held = True, rest
            return Parsed(before)
        size = len(self._held) - overlap(self._held, self.MARK)
        said, self._held = self._held[:size], self._held[size:]
        return Parsed(said)

    def flush(self) -> Parsed:
        held, self._held = self._held, ""
        if not self._is_inside:
            return Parsed(held)
        parts = _split_outside_strings(held, self.MARK)
        calls = [call for part in parts for call in self._calls_of(part.strip())]
        whole = tuple(call for call in calls if call is not None)
        return (
            Parsed(calls=whole) if whole and len(whole) == len(calls) else Parsed(self.MARK + held)
        )

    def _calls_of(self, part: str) -> list[ToolCall | None]:
        if part.startswith("["):
            values = _loads(part)
            has_calls = isinstance(values, list) and values
            return list(map(self._call_of, values)) if has_calls else [None]
        name, mark, arguments = part.partition(self.ARGS)
        if not mark:
            name, _, rest = part.partition("{")
            arguments = "{" + rest
        return [self._call_of({"name": name.strip(), "arguments": _loads(arguments)})]


class _NoTools(ToolParser):
    def feed(self, text: str) -> Parsed:
        return Parsed(text)

    def flush(self) -> Parsed:
        return Parsed()


_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": _Hermes,
    "llama3": _Llama3,
    "mistral": _Mistral,
    "none": _NoTools,
}


def _loads(text: str) -> Any:
    """Return the value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _dumps(value: Any) -> str:
    """Return the JSON text of a value; "" if it has none: NaN, or too deep."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if _is_sendable(text) else json.dumps(value)
    except (ValueError, RecursionError):
        return ""


def _ends_in_string(text: str) -> bool:
    """Return whether a beginning of JSON ends inside of a string."""
    return _ESCAPE.sub("", text).count('"') % 2 == 1


def _split_outside_strings(text: str, mark: str) -> list[str]:
    """Return what stands between marks that are not in strings of JSON."""
    first, *others = text.split(mark)
    parts = [first]
    for part in others:
        if _ends_in_string(parts[-1]):
            parts[-1] += mark + part
        else:
            parts.append(part)
    return parts


def _is_sendable(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _split_values(text: str, *, separator: str) -> list[Any]:
    """Return JSON values with a separator between them; with a None where one is broken."""
    decoder = json.JSONDecoder()
    values: list[Any] = []
    rest = text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return [*values, None]
        values.append(value)
        rest = rest[end:].strip()
        if rest and not rest.startswith(separator):
            return [*values, None]
        rest = rest.removeprefix(separator).strip()
    return values
