"""Regular expressions: what xgrammar would take for something else is found before it sees them.

It reads some constructs and does not apply them, such as lookahead in a schema's pattern or an
anchor inside of an expression. What it refuses by itself is not looked for here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u\{[0-9a-fA-F]{1,6}\}|u[0-9a-fA-F]{4}|c.|.)"
_TOKEN = re.compile(
    rf"{_ESCAPE}|\[(?:\\.|[^\]\\])*\]|\(\?(?:P?<[A-Za-z_]\w*>|:)?|[*+?}}]\+|.", re.DOTALL
)
_IN_CLASS = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "e": "\x1b", "0": "\0"}
_MAX_CODE = 0x10FFFF


def problem_of(pattern: str, *, is_in_json: bool) -> str:
    """Return what keeps a regular expression from being followed exactly; "": nothing.

    Args:
        is_in_json: It is about the text of a JSON string, which is written without escapes.
    """
    depth, before = 0, "|"
    tokens = _TOKEN.findall(pattern)
    for token, after in zip(tokens, [*tokens[1:], "|"], strict=True):
        problem = _problem_of_token(token)
        if token == "^" and (depth or before != "|"):
            problem = "^ stands inside of it; it may only begin it, or an alternative of it"
        if token == "$" and (depth or after != "|"):
            problem = "$ stands inside of it; it may only end it, or an alternative of it"
        if is_in_json and not problem and not all(map(_is_plain, _chars_of(token))):
            problem = f"{token} is a character that JSON writes with a backslash"
        if problem:
            return problem
        depth += token.startswith("(")
        depth -= token == ")"
        before = token
    return ""


def without(names: Iterable[str]) -> str:
    """Return a regular expression of every text in JSON without escapes that is none of these."""
    return f"^{_outside([name for name in names if all(map(_is_plain, name))])}$"


def _problem_of_token(token: str) -> str:
    if token == "(?":
        return "it has a group that looks around or sets flags"
    if len(token) == 2 and token[0] in "*+?}" and token[1] == "+":
        return f"{token} repeats without giving back"
    return ""


def _chars_of(token: str) -> list[str]:
    """Return the characters that a token demands as they are."""
    if token.startswith("[") and len(token) > 1:
        is_negated = token.startswith("[^")
        return [] if is_negated else list(map(_char_of, _IN_CLASS.findall(token[1:-1])))
    return [_char_of(token)] if token.startswith("\\") or len(token) == 1 else []


def _char_of(token: str) -> str:
    if len(token) == 1:
        return token
    kind, digits = token[1], token[2:].strip("{}")
    if kind in "xu" and digits:
        return chr(min(int(digits, 16), _MAX_CODE))
    return "\x01" if kind == "c" and digits else _CONTROLS.get(kind, kind)


def _is_plain(char: str) -> bool:
    """Return whether JSON may write a character as it is."""
    return json.dumps(char, ensure_ascii=False) == f'"{char}"'


def _outside(names: list[str]) -> str:
    """Return an expression of all texts but these, as a tree of their first letters."""
    tails: dict[str, list[str]] = {}
    for name in names:
        if name:
            tails.setdefault(name[0], []).append(name[1:])
    if not tails:
        return ".+" if names else ".*"
    others = "".join(f"\\u{{{ord(first):x}}}" for first in tails)
    choices = [f"[^{others}].*"]
    choices += [f"{_literal(first)}{_outside(rest)}" for first, rest in tails.items()]
    if "" not in names:
        choices.append("")
    return f"({'|'.join(choices)})"


def _literal(char: str) -> str:
    return char if char.isalnum() else f"\\u{{{ord(char):x}}}"
