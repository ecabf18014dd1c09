"""What grammars cost and gain: masks by themselves, and JSON of a schema beside free text.

    python -m benchmarks.structured_output --output benchmarks/results/structured_output_cpu.json

Masks: a vocabulary of `--vocab` made-up tokens, outputs that stand anywhere in a document, trees of
5/4/16: what the target's host takes for the masks of a round, and the draft's for those of a tree,
which is grown depth by depth; for a schema of strings of any length, and one of strings that end
near where the outputs stand. Streams: a stack of the bundled pair, or `--server`, as many at a time
as `--streams` says, in each mode of speculation, every output compared with that without
speculation. Each schema of the cold cell is new: its first token comes after it was compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xgrammar

from benchmarks.machine import describe_machine
from coppice import Client, FinishInfo, TokenDelta
from coppice.stack.config import stack_config
from draft_service.growth_masks import GrowthMasks
from shared.grammar.compile import compile_grammar, read_compiled
from shared.grammar.matcher import OutputMatcher, Vocabulary
from shared.grammar.source import Grammar, GrammarKind
from tests.e2e.serving import Server

PROMPT = "config = "
FREE_PROMPT = "def read_config(path):\n"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 10},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
DOCUMENT = (
    '{"name": "Ada", "age": 36, "tags": ["red", "blue"], '
    '"address": {"street": "Main", "zip": "12345"}}'
)
_DEPTH, _WIDTH, _NODES = 5, 4, 16
_MODES = {"off": False, "auto": None, "on": True}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRow:
    """Masks of so many requests, medians in milliseconds.

    Args:
        strings: "any length" or "limited".
        target_ms: Of all nodes of their trees.
        draft_ms: Of all depths of their trees.
        prune_ms: To leave nodes out and add those that are certain.
    """

    strings: str
    num_requests: int
    target_ms: float
    draft_ms: float
    prune_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRow:
    """So many streams at a time.

    Args:
        text: "schema" or "free".
        first_ms: Median time to the first token.
    """

    text: str
    mode: str
    num_streams: int
    tokens_per_s: float
    accept_length: float
    first_ms: float
    identical: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    token_ids: tuple[int, ...]
    first_s: float
    num_rounds: int
    num_accepted: int


def main() -> None:
    """Measure what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocab", type=int, default=128_256, help="tokens of the masks' model")
    parser.add_argument("--requests", default="1,8,32", help="of the masks, comma-separated")
    parser.add_argument("--streams", default="1,8", help="at a time, comma-separated")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--server", help="one that runs; default: a stack of the bundled pair")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    masks = measure_masks(arguments.vocab, _numbers(arguments.requests), arguments.repeat)
    with _running(arguments.server, arguments.device) as address:
        streams = measure_streams(address, _numbers(arguments.streams), arguments.repeat)
        first_ms = measure_first_tokens(address, arguments.repeat)
    document = {
        **describe_machine(),
        "load_average": os.getloadavg()[0],
        "masks": [asdict(row) for row in masks],
        "streams": [asdict(row) for row in streams],
        "first_token_ms": first_ms,
    }
    print(json.dumps(document, indent=1))  # noqa: T201
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    if not all(row.identical for row in streams):
        sys.exit("speculation changed an output: that is a bug")


@contextlib.contextmanager
def _running(address: str | None, device: str) -> Iterator[str]:
    """Yield the address of a server; of a stack's own where none is given."""
    if address is not None:
        yield address
        return
    server = Server(stack_config({"device": device, "num_drafts": 1, "port": 0}))
    with server:
        server.wait_paired()
        yield server.address


# --- masks ---------------------------------------------------------------------------------------


def measure_masks(vocab_size: int, counts: Sequence[int], repeat: int) -> list[MaskRow]:
    """Time the masks of trees, with every matcher somewhere else in the document."""
    vocabulary = make_vocabulary(vocab_size)
    compiler = xgrammar.GrammarCompiler(vocabulary.info, max_threads=1)
    limited = json.dumps(SCHEMA)
    schemas = {"any length": re.sub(r', "maxLength": \d+', "", limited), "limited": limited}
    document = list(vocabulary.split(DOCUMENT.encode()))
    rng = random.Random(0)
    rows = []
    for strings, count in itertools.product(schemas, counts):
        grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, source=schemas[strings])
        compiled = read_compiled(compile_grammar(compiler, grammar), vocabulary.info)
        matchers = [OutputMatcher(compiled, vocabulary) for _ in range(count)]
        starts = [rng.randrange(len(document)) for _ in matchers]
        for matcher, start in zip(matchers, starts, strict=True):
            assert matcher.accept(document[:start])
        trees = [_tree(document[start:], vocab_size, rng) for start in starts]
        times = [_time_masks(matchers, trees, vocab_size) for _ in range(max(repeat, 3))]
        target_s, draft_s, prune_s = map(statistics.median, zip(*times, strict=True))
        rows.append(
            MaskRow(
                strings=strings,
                num_requests=count,
                target_ms=round(target_s * 1e3, 3),
                draft_ms=round(draft_s * 1e3, 3),
                prune_ms=round(prune_s * 1e3, 3),
            )
        )
    return rows


def make_vocabulary(size: int) -> Vocabulary:
    """Return bytes, what JSON is written with, made-up words, and a stop token."""
    rng = random.Random(1)
    pieces = ['{"', '":', '": "', '",', '", "', '"}', "true", "false", "null", ', "', ' "', "  "]
    tokens = [*(bytes([i]) for i in range(256)), *(piece.encode() for piece in pieces)]
    seen = {*tokens}
    while len(tokens) < size - 1:
        word = "".join(rng.choices(_LETTERS, k=rng.randrange(2, 9)))
        token = (" " * (rng.random() < 0.4) + word).encode()
        if token not in seen:
            seen.add(token)
            tokens.append(token)
    info = xgrammar.TokenizerInfo(
        [*tokens, b"<stop>"], xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=[size - 1]
    )
    return Vocabulary(info)


def _tree(
    continuation: Sequence[int], vocab_size: int, rng: random.Random
) -> tuple[list[int], tuple[int, ...]]:
    """Return a tree that is right along one path and wrong beside it."""
    tokens, parents, right = [0], [-1], 0
    for depth in range(_DEPTH):
        first = len(tokens)
        for child in range(3):
            is_right = child == 0 and depth < len(continuation)
            tokens.append(continuation[depth] if is_right else rng.randrange(vocab_size))
            parents.append(right)
        right = first
    return tokens[:_NODES], tuple(parents[:_NODES])


def _time_masks(
    matchers: Sequence[OutputMatcher],
    trees: Sequence[tuple[list[int], tuple[int, ...]]],
    vocab_size: int,
) -> tuple[float, float, float]:
    num_words = -(-vocab_size // 32)
    masks = torch.empty(_NODES, num_words, dtype=torch.int32)
    began = time.perf_counter()
    for matcher, (tokens, parents) in zip(matchers, trees, strict=True):
        matcher.fill_masks(masks[: len(tokens)], tokens, parents)
    masked = time.perf_counter()
    for matcher, (tokens, _) in zip(matchers, trees, strict=True):
        growth = GrowthMasks([matcher], num_places=1)
        for depth in range(_DEPTH):
            path = tokens[1 : 3 * depth : 3]  # of the right child at each depth
            for _ in range(_WIDTH if depth else 1):
                growth.fill(0, masks[:1], path)
    grown = time.perf_counter()
    for matcher, (tokens, parents) in zip(matchers, trees, strict=True):
        matcher.prune_and_graft(tokens, parents, most_nodes=64)
    return masked - began, grown - masked, time.perf_counter() - grown


# --- streams -------------------------------------------------------------------------------------


def measure_streams(address: str, counts: Sequence[int], repeat: int) -> list[StreamRow]:
    """Stream JSON of the schema, then as much free text, in each mode."""
    rows = []
    with Client(address) as client:
        for text in ("schema", "free"):
            options: dict[str, Any] = {"max_new_tokens": 200, "json_schema": SCHEMA}
            if text == "free":
                options = {"max_new_tokens": 80, "ignore_eos": True}
            for count in counts:
                plain: list[tuple[int, ...]] = []
                for mode, speculation in _MODES.items():
                    given = {**options, "speculation": speculation}
                    _stream_all(client, text, count, given)  # what is learnt, is learnt here
                    began, outputs = time.perf_counter(), []
                    for _ in range(repeat):
                        outputs += _stream_all(client, text, count, given)
                    took_s = time.perf_counter() - began
                    ids = [output.token_ids for output in outputs]
                    plain = plain or ids
                    num_rounds = sum(output.num_rounds for output in outputs)
                    num_accepted = sum(output.num_accepted for output in outputs)
                    rows.append(
                        StreamRow(
                            text=text,
                            mode=mode,
                            num_streams=count,
                            tokens_per_s=round(sum(map(len, ids)) / took_s, 1),
                            accept_length=round(1 + num_accepted / max(num_rounds, 1), 2),
                            first_ms=_median_ms([output.first_s for output in outputs]),
                            identical=ids == plain,
                        )
                    )
    return rows


def measure_first_tokens(address: str, repeat: int) -> dict[str, float]:
    """Return the median time to a first token: free, of a known schema, of one never seen."""
    times: dict[str, list[float]] = {"free": [], "cached schema": [], "cold schema": []}
    with Client(address) as client:
        for i in range(2 * repeat):
            tags = {"type": "array", "items": {"enum": ["red", f"{time.time_ns()}"]}}
            cold = {**SCHEMA, "properties": {**SCHEMA["properties"], "tags": tags}}
            for name, options in (
                ("free", {}),
                ("cached schema", {"json_schema": SCHEMA}),
                ("cold schema", {"json_schema": cold}),
            ):
                output = _stream(client, PROMPT, {**options, "max_new_tokens": 4, "seed": i})
                times[name].append(output.first_s)
    return {name: _median_ms(seconds) for name, seconds in times.items()}


def _stream_all(client: Client, text: str, count: int, options: dict[str, Any]) -> list[_Output]:
    """Stream so many requests at a time, half of them sampled."""
    prompt = FREE_PROMPT if text == "free" else PROMPT

    def one(i: int) -> _Output:
        sampling = {"temperature": 0.9, "seed": i} if i % 2 else {}
        return _stream(client, prompt, {**options, **sampling})

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


def _stream(client: Client, prompt: str, options: dict[str, Any]) -> _Output:
    began, first_s = time.perf_counter(), 0.0
    token_ids: list[int] = []
    num_rounds = num_accepted = 0
    for event in client.stream(prompt, **options):
        if isinstance(event, TokenDelta):
            first_s = first_s or time.perf_counter() - began
            token_ids += event.token_ids
        elif isinstance(event, FinishInfo):
            num_rounds = event.speculation.num_rounds
            num_accepted = event.speculation.num_accepted_drafts
    return _Output(
        token_ids=tuple(token_ids),
        first_s=first_s,
        num_rounds=num_rounds,
        num_accepted=num_accepted,
    )


def _median_ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 2)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
