"""The "model" that both fake engines know."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from shared.messages import SamplingParams, TokenTree

VOCAB_SIZE = 512
WIDTH = 6


def next_token(tokens: Sequence[int], sampling: SamplingParams | None = None) -> int:
    """Return the token that follows: a hash of all tokens, of the seed too when it samples."""
    seed = sampling.seed if sampling is not None and sampling.temperature > 0 else 0
    data = struct.pack(f"<Q{len(tokens)}i", seed, *tokens)
    return zlib.crc32(data) % VOCAB_SIZE


def generate(
    prompt: Sequence[int], count: int, sampling: SamplingParams | None = None
) -> list[int]:
    """Return the first `count` tokens after a prompt: what any correct serving must output."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, sampling))
    return tokens[len(prompt) :]


def accept(
    tokens: Sequence[int], tree: TokenTree | None, sampling: SamplingParams
) -> tuple[list[int], list[int]]:
    """Walk a tree from its root as far as it agrees with the model.

    Args:
        tokens: The root's included.
        tree: None: the root alone.
    Returns: accepted nodes, root first; their next tokens, the bonus token last.
    """
    children: dict[tuple[int, int], int] = {}
    if tree is not None:
        for node, key in enumerate(zip(tree.parent_index, tree.token_ids, strict=True)):
            children.setdefault(key, node)
    path: list[int] = [0]
    emitted: list[int] = []
    while True:
        emitted.append(next_token([*tokens, *emitted], sampling))
        child = children.get((path[-1], emitted[-1]))
        if child is None:
            return path, emitted
        path.append(child)


def feature_rows(tokens: Sequence[int], start: int, end: int, width: int = WIDTH) -> bytes:
    """Return rows [start, end) as little-endian float32: (position, token, 0.5, 1.5, ...)."""
    rows = bytearray()
    for position in range(start, end):
        tail = [0.5 + column for column in range(width - 2)]
        rows += struct.pack(f"<{width}f", position, tokens[position], *tail)
    return bytes(rows)


def routed_row(tokens: Sequence[int], num_experts: int) -> bytes:
    """Return the experts of the row of the last of `tokens`: two in each of two layers."""
    first = (7 * len(tokens) + tokens[-1]) % (num_experts - 1)
    ids = (first, num_experts - 1, 0, 1 + first)
    return struct.pack("<4B" if num_experts <= 256 else "<4H", *ids)
