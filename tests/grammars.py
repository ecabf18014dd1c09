"""Grammars for tests, compiled for the tokens of a checkpoint, and who tells their outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jsonschema
import tokenizers
import xgrammar

from shared.grammar.compile import compile_grammar, read_compiled
from shared.grammar.matcher import OutputMatcher, Vocabulary
from shared.grammar.source import Grammar, GrammarKind
from shared.grammar.tokens import token_info
from tests.checkpoints import EOS_ID, VOCAB_SIZE

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["alpha", "beta", "alphabet"]},
        "is_on": {"type": "boolean"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "is_on", "size"],
    "additionalProperties": False,
}


class Case(NamedTuple):
    """A grammar whose outputs end soon, and whether a text is one."""

    grammar: Grammar
    has: Callable[[str], bool]


def _is_of_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


CASES = {
    "schema": Case(
        Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(SCHEMA)),
        _is_of_schema,
    ),
    "regex": Case(
        Grammar(kind=GrammarKind.REGEX, source=r"(ab|cd){1,4}-[0-9]{2,5}é?"),
        lambda text: re.fullmatch(r"(ab|cd){1,4}-[0-9]{2,5}é?", text) is not None,
    ),
    "ebnf": Case(
        Grammar(
            kind=GrammarKind.EBNF,
            source='root ::= "<" [a-c]{1,3} ">" ("," root){0,1}',
        ),
        lambda text: re.fullmatch(r"(<[a-c]{1,3}>,)*<[a-c]{1,3}>", text) is not None,
    ),
    "choice": Case(
        Grammar(kind=GrammarKind.EBNF, source='root ::= "yes" | "no" | "naught" | "ja, genau"'),
        lambda text: text in {"yes", "no", "naught", "ja, genau"},
    ),
    "tag": Case(
        Grammar(
            kind=GrammarKind.STRUCTURAL_TAG,
            source=json.dumps(
                {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<f>",
                        "content": {"type": "json_schema", "json_schema": SCHEMA},
                        "end": "</f>",
                    },
                }
            ),
        ),
        lambda text: _is_of_schema(text.removeprefix("<f>").removesuffix("</f>")),
    ),
}


@cache
def vocabulary_of(directory: Path) -> Vocabulary:
    """Return the tokens of a tiny checkpoint."""
    return Vocabulary(token_info(directory, VOCAB_SIZE, [EOS_ID]))


@cache
def compiled_for(directory: Path, name: str) -> bytes:
    """Return a case, compiled for the tokens of a tiny checkpoint."""
    compiler = xgrammar.GrammarCompiler(vocabulary_of(directory).info, max_threads=1)
    return compile_grammar(compiler, CASES[name].grammar)


def matcher_of(directory: Path, name: str) -> OutputMatcher:
    """Return what follows outputs of a case, for the tokens of a tiny checkpoint."""
    vocabulary = vocabulary_of(directory)
    compiled = read_compiled(compiled_for(directory, name), vocabulary.info)
    return OutputMatcher(compiled, vocabulary)


def text_of(directory: Path, output: list[int]) -> str:
    """Return the text of an output, its stop token left out."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    text: str = tokenizer.decode([token for token in output if token != EOS_ID])
    return text
