"""Grammar -> what a matcher needs, as bytes that cross hosts."""

from __future__ import annotations

import re
import zlib

import numpy as np
import xgrammar

from shared.errors import InvalidArgumentError
from shared.grammar.source import Grammar, GrammarKind

_LOCATION = re.compile(r"^\[[0-9:]+\] \S+: ", re.MULTILINE)  # before the library's own messages
_MOST_SAID = 500


def compile_grammar(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> bytes:
    """Compile a grammar. It may take any time, and any memory: let others wait for it.

    Returns: for `read_compiled`.

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
    return zlib.compress(compiled.serialize_json().encode(), level=1)


def read_compiled(data: bytes, tokens: xgrammar.TokenizerInfo) -> xgrammar.CompiledGrammar:
    """Return what `compile_grammar` compiled for the same tokens.

    Raises: InvalidArgumentError if that was something else.
    """
    try:
        text = zlib.decompress(data).decode()
        return xgrammar.CompiledGrammar.deserialize_json(text, tokens)
    except (RuntimeError, ValueError, zlib.error) as error:
        raise InvalidArgumentError(
            f"the compiled grammar cannot be read: {error}; workers and orchestrator need the same "
            "tokenizer and the same version of xgrammar",
            reason="INVALID_GRAMMAR",
            field="structured_output",
        ) from None


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
