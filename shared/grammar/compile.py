"""Grammar -> what a matcher needs, as text that another process can read."""

from __future__ import annotations

import re

import numpy as np
import xgrammar

from shared.errors import InvalidArgumentError
from shared.messages import Grammar, GrammarKind

_LOCATION = re.compile(r"^\[[0-9:]+\] \S+: ", re.MULTILINE)  # before the library's own messages
_MOST_SAID = 500


def compile_grammar(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> str:
    """Compile a grammar. It may take any time, and any memory: let others wait for it.

    Raises: InvalidArgumentError if it is none, or if no output can have it.
    """
    try:
        compiled = _compile(compiler, grammar)
    except (RuntimeError, ValueError, TypeError) as error:
        said = _LOCATION.sub("", str(error)).strip()[:_MOST_SAID]
        raise InvalidArgumentError(said, reason="INVALID_GRAMMAR") from None
    mask = np.zeros((1, -(-compiled.tokenizer_info.vocab_size // 32)), dtype=np.int32)
    xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask)
    if not mask.any():
        raise InvalidArgumentError("no token of this model can begin it", reason="INVALID_GRAMMAR")
    return str(compiled.serialize_json())


def _compile(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    source = grammar.source
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            # Fixed white space: what is certain need not be guessed, and there is no endless blank.
            return compiler.compile_json_schema(source, any_whitespace=False)
        case GrammarKind.REGEX:
            return compiler.compile_regex(source)
        case GrammarKind.EBNF:
            return compiler.compile_grammar(source)
        case GrammarKind.STRUCTURAL_TAG:
            return compiler.compile_structural_tag(source)
    raise ValueError(f"{grammar.kind} is no kind of grammar")
