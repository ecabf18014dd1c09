"""Flags of a request: sampling, stopping, speculation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from coppice.request import DEFAULT_MAX_NEW_TOKENS
from coppice.structured_output import CONSTRAINTS
from shared.config.check import check_tree_shape, flag_name
from shared.errors import ConfigError

# Flag, type, help; the name is the keyword of Client.
SAMPLING = (
    ("--temperature", float, "0 = greedy (default)"),
    ("--top-p", float, "keep the most likely tokens of this mass together; 1 = off"),
    ("--top-k", int, "keep this many of the most likely tokens; 0 = off"),
    ("--min-p", float, "keep tokens of at least this share of the most likely one; 0 = off"),
    ("--repetition-penalty", float, "over prompt and output; 1 = off"),
    ("--presence-penalty", float, "once for a token in the output; 0 = off"),
    ("--frequency-penalty", float, "for each time that a token is in the output; 0 = off"),
    ("--seed", int, "chosen by the server when absent"),
)
SHAPE = (
    ("--num-steps", int, "tree depth without the root"),
    ("--topk", int, "children kept per expanded node"),
    ("--num-draft-tokens", int, "nodes verified per round, root included"),
)


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Add every flag of a request."""
    parser.add_argument(
        "--request-id", metavar="NAME", help="by which logs and `coppice admin abort` name it"
    )
    sampling = parser.add_argument_group("sampling")
    for flag, kind, text in SAMPLING:
        sampling.add_argument(flag, type=kind, help=text)
    sampling.add_argument(
        "--logit-bias",
        action="append",
        metavar="ID=VALUE",
        help="add VALUE to a token's logit; may be repeated",
    )
    stopping = parser.add_argument_group("stopping")
    stopping.add_argument(
        "--max-new-tokens",
        type=int,
        default=DEFAULT_MAX_NEW_TOKENS,
        help=f"0 = up to the context length; default: {DEFAULT_MAX_NEW_TOKENS}",
    )
    stopping.add_argument("--min-new-tokens", type=int, help="no stop token before; default 0")
    stopping.add_argument(
        "--stop",
        action="append",
        dest="stop_strings",
        metavar="TEXT",
        help="stop before this text; may be repeated",
    )
    stopping.add_argument(
        "--stop-token-id",
        action="append",
        dest="stop_token_ids",
        type=int,
        metavar="ID",
        help="stop at this token; may be repeated",
    )
    stopping.add_argument("--ignore-eos", action="store_true", help="go on past the model's end")
    stopping.add_argument(
        "--include-stop",
        action="store_true",
        dest="include_stop_in_output",
        help="keep the stop in the output",
    )
    _add_constraints(parser)
    speculation = parser.add_argument_group("speculation; the output does not depend on it")
    speculation.add_argument("--no-speculation", action="store_true", help="decode token by token")
    for flag, kind, text in SHAPE:
        speculation.add_argument(flag, type=kind, help=text)


def _add_constraints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output; at most one of them")
    only = group.add_mutually_exclusive_group()
    for flag, text in (
        ("--json-schema", "the output is JSON of this schema; a file, or the text of one"),
        ("--ebnf", "the output is of this grammar, in GBNF; a file, or the text of one"),
        ("--structural-tag", "free text with parts that have grammars; a file, or its JSON"),
    ):
        only.add_argument(flag, metavar="FILE|TEXT", help=text)
    only.add_argument("--regex", metavar="TEXT", help="the whole output is matched by it")
    only.add_argument(
        "--choice", action="append", metavar="TEXT", help="the output is one of these; repeat it"
    )


def request_keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of `Client.stream` that were given.

    Raises: ConfigError if a flag cannot work whatever the server.
    """
    names = [flag[2:].replace("-", "_") for flag, _, _ in (*SAMPLING, *SHAPE)]
    names += ["min_new_tokens", "stop_strings", "stop_token_ids", "request_id"]
    keywords = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.max_new_tokens < 0:
        raise ConfigError(
            f"--max-new-tokens is {arguments.max_new_tokens}, expected 1 or more, or 0 = up to the "
            "context length"
        )
    keywords["max_new_tokens"] = arguments.max_new_tokens or None
    for name in ("ignore_eos", "include_stop_in_output"):
        if getattr(arguments, name):
            keywords[name] = True
    keywords |= _constraints(arguments)
    if arguments.no_speculation:
        keywords["speculation"] = False
        for flag, _, _ in SHAPE:
            if flag[2:].replace("-", "_") in keywords:
                refuse_without_trees(flag)
    if arguments.logit_bias:
        keywords["logit_bias"] = dict(_parse_bias(text) for text in arguments.logit_bias)
    shape = [keywords.get(flag[2:].replace("-", "_"), 0) for flag, _, _ in SHAPE]
    check_tree_shape(*shape)
    return keywords


def refuse_without_trees(flag: str) -> NoReturn:
    """Raise ConfigError: a flag is about trees, of which --no-speculation wants none."""
    raise ConfigError(f"{flag} means nothing with --no-speculation: leave out one of them")


def _constraints(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the output must be. Raises: ConfigError if a file cannot be read."""
    given = {name: value for name in CONSTRAINTS if (value := getattr(arguments, name)) is not None}
    for name in ("json_schema", "ebnf", "structural_tag"):
        if name in given:
            given[name] = _text_of(flag_name(name), given[name])
    return given


def _text_of(flag: str, value: str) -> str:
    """Return a text as it is, or that of the file which it names."""
    if "::=" in value or value.lstrip().startswith(("{", "true", "false")):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {flag} {value[:80]}: {error}") from None


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise ConfigError(f"--logit-bias is {text!r}, expected ID=VALUE as in 42=-100") from None
