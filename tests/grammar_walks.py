"""Grammars without a model: compiled for the bundled tokenizer, and walked at random."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar

from coppice.v1 import generation_pb2 as pb
from orchestrator.structured_output import parse_grammar
from shared.grammar.compile import compile_grammar, read_compiled
from shared.grammar.matcher import OutputMatcher, Vocabulary
from shared.grammar.tokens import token_info

TARGET = Path(__file__).resolve().parents[1] / "coppice" / "bundled" / "target"
MAX_TOKENS = 400
_CALM_AFTER = 60


@functools.cache
def vocabulary() -> Vocabulary:
    """Return the tokens of the bundled target."""
    config = json.loads((TARGET / "config.json").read_text())
    eos = json.loads((TARGET / "generation_config.json").read_text())["eos_token_id"]
    stops = eos if isinstance(eos, list) else [eos]
    return Vocabulary(token_info(TARGET, config["vocab_size"], stops))


@functools.cache
def _spelled() -> tuple[list[bytes], frozenset[int]]:
    """Return the bytes of every token, and those that end an output."""
    info = vocabulary().info
    return list(info.decoded_vocab), frozenset(info.stop_token_ids)


@functools.cache
def _compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(vocabulary().info, max_threads=1, cache_enabled=False)


def matcher_of(**constraint: Any) -> OutputMatcher:
    """Return a matcher of what a request asks for, by a field of StructuredOutput.

    Raises: InvalidArgumentError if it is refused, by the orchestrator or by the compiler.
    """
    request = pb.GenerateRequest(structured_output=pb.StructuredOutput(**constraint))
    grammar = parse_grammar(request)
    assert grammar is not None
    compiled = compile_grammar(_compiler(), grammar, trial_s=0.0)
    return OutputMatcher(read_compiled(compiled, vocabulary().info), vocabulary())


def takes(matcher: OutputMatcher, text: str) -> bool:
    """Return whether a text is a whole output."""
    tokens = list(vocabulary().split(text.encode()))
    assert b"".join(_spelled()[0][token] for token in tokens) == text.encode()
    if not matcher.accept(tokens):
        return False
    return bool(_allowed(matcher) & _spelled()[1])


def walk(matcher: OutputMatcher, seed: int) -> str | None:
    """Return an output of tokens drawn from those that may follow; None: it does not end in time.

    After a while tokens that bring the output nearer to its end are preferred.
    """
    draw = random.Random(seed)
    spelled, stops = _spelled()
    output = b""
    for count in range(MAX_TOKENS):
        allowed = _allowed(matcher)
        texts = sorted(allowed - stops)
        may_end = len(texts) < len(allowed)
        if may_end and (not texts or count > _CALM_AFTER or draw.random() < 0.2):
            return _text(output)
        if not texts:
            return None
        if count > _CALM_AFTER:
            ends = [token for token in texts if spelled[token][:1] in b'"]}']
            short = [token for token in texts if len(spelled[token]) == 1]
            texts = (ends if draw.random() < 0.5 else short) or ends or texts
        token = draw.choice(texts)
        assert matcher.accept([token])
        output += spelled[token]
    return None


def _text(output: bytes) -> str | None:
    """Return a text; None: xgrammar lets bytes through that would be half a surrogate pair."""
    try:
        return output.decode()
    except UnicodeDecodeError:
        return None


def _allowed(matcher: OutputMatcher) -> set[int]:
    mask = torch.zeros(1, -(-len(_spelled()[0]) // 32), dtype=torch.int32)
    matcher.fill_mask_after(mask, [])
    bits = np.unpackbits(mask[0].view(torch.uint8).numpy(), bitorder="little")
    return set(bits.nonzero()[0].tolist())
