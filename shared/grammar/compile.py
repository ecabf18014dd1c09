"""Grammar -> what a matcher needs, as bytes that cross hosts."""

from __future__ import annotations

import re
import time
import zlib

import numpy as np
import xgrammar

from shared.errors import InvalidArgumentError
from shared.grammar.source import Grammar, GrammarKind

_LOCATION = re.compile(r"^\[[0-9:]+\] \S+: ", re.MULTILINE)  # before the library's own messages
_MOST_SAID = 500
_TRIAL_S = 0.1
_MOST_MASK_S = 0.5


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
    _try_out(compiled)
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


def _try_out(compiled: xgrammar.CompiledGrammar) -> None:
    """Follow some outputs for a moment: nobody is to find out while others wait for a step.

    Raises: InvalidArgumentError if there is none, or if a step of it takes too long.
    """
    matcher, rng = xgrammar.GrammarMatcher(compiled), np.random.default_rng(0)
    mask = np.zeros((1, -(-compiled.tokenizer_info.vocab_size // 32)), dtype=np.int32)
    end_s, is_first = time.monotonic() + _TRIAL_S, True
    while is_first or time.monotonic() < end_s:
        began_s = time.monotonic()
        matcher.fill_next_token_bitmask(mask)
        if time.monotonic() - began_s > _MOST_MASK_S:
            raise InvalidArgumentError(
                f"to find out which tokens may follow takes more than {_MOST_MASK_S:g} s",
                reason="INVALID_GRAMMAR",
            )
        (allowed,) = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()
        if is_first and not len(allowed):
            raise InvalidArgumentError(
                "no token of this model can begin it", reason="INVALID_GRAMMAR"
            )
        is_first = False
        if not len(allowed) or not matcher.accept_token(int(rng.choice(allowed))):
            return
        if matcher.is_terminated():
            matcher.reset()


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
