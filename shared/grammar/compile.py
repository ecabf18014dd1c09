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
# A character of a string with minLength or maxLength; control characters are no JSON.
_LENGTH_CHARACTER = re.compile(
    r'^(\S+_characters ::= \(\()\[\^\\"\\\\\\r\\n\](?=\)\)$)', re.MULTILINE
)
_JSON_CHARACTER = r"[^\0-\x1f\"\\]"


def compile_grammar(
    compiler: xgrammar.GrammarCompiler, grammar: Grammar, *, trial_s: float = _TRIAL_S
) -> bytes:
    """Compile a grammar. It may take any time, and any memory: let others wait for it.

    Args:
        trial_s: How long outputs are tried out; no less than the first token of one.
    Returns: for `read_compiled`.

    Raises: InvalidArgumentError if it is none, or if no output can have it.
    """
    try:
        compiled = _compile(compiler, grammar)
    except (RuntimeError, ValueError, TypeError) as error:
        said = _LOCATION.sub("", str(error)).strip()[:_MOST_SAID]
        raise InvalidArgumentError(said, reason="INVALID_GRAMMAR") from None
    _try_out(compiled, trial_s)
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


def _try_out(compiled: xgrammar.CompiledGrammar, trial_s: float) -> None:
    """Follow some outputs for a moment: nobody is to find out while others wait for a step.

    Raises: InvalidArgumentError if there is none, or if a step of it takes too long.
    """
    matcher, rng = xgrammar.GrammarMatcher(compiled), np.random.default_rng(0)
    mask = np.zeros((1, -(-compiled.tokenizer_info.vocab_size // 32)), dtype=np.int32)
    end_s, is_first = time.monotonic() + trial_s, True
    while is_first or time.monotonic() < end_s:
        began_s = time.thread_time()  # of a core: waiting for one is not the grammar's fault
        matcher.fill_next_token_bitmask(mask)
        if time.thread_time() - began_s > _MOST_MASK_S:
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
            parsed = xgrammar.Grammar.from_json_schema(source, any_whitespace=False)
            return compiler.compile_grammar(_without_controls(parsed))
        case GrammarKind.REGEX:
            return compiler.compile_regex(source)
        case GrammarKind.EBNF:
            return compiler.compile_grammar(source)
        case GrammarKind.STRUCTURAL_TAG:
            if '"minLength"' not in source and '"maxLength"' not in source:
                return compiler.compile_structural_tag(source)
            parsed = xgrammar.Grammar.from_structural_tag(source)
            return compiler.compile_grammar(_without_controls(parsed))
    raise ValueError(f"{grammar.kind} is no kind of grammar")


def _without_controls(grammar: xgrammar.Grammar) -> xgrammar.Grammar:
    """Return the grammar of JSON whose strings have no control characters as they are."""
    text, count = _LENGTH_CHARACTER.subn(lambda found: found[1] + _JSON_CHARACTER, str(grammar))
    return xgrammar.Grammar.from_ebnf(text) if count else grammar
