"""Prompts are tokenized within bounds: of bytes, of time after a cancel, of work in vain."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator import encoding
from orchestrator.encoding import PromptEncoder
from orchestrator.tokenizer import Tokenizer
from shared.errors import InvalidArgumentError, ResourceExhaustedError
from tests.contract.serving import write_model

pytestmark = pytest.mark.asyncio

PIECE = encoding._PIECE_CHARS


class Slow:
    """A tokenizer of one token per character that waits to be let on, piece by piece.

    Args:
        max_token_bytes: What it says of itself.
    """

    def __init__(self, *, max_token_bytes: int = 64, is_open: bool = False) -> None:
        self.max_token_bytes = max_token_bytes
        self.sizes: list[int] = []
        self.started = threading.Semaphore(0)
        self.gate = threading.Semaphore(1_000_000 if is_open else 0)

    def encode(self, text: str, *, adds_special: bool = True) -> tuple[int, ...]:
        return tuple(range(self.count(text)))

    def count(self, text: str) -> int:
        self.sizes.append(len(text))
        self.started.release()
        assert self.gate.acquire(timeout=60)
        return len(text)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        return "x" * self.count("x" * len(token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        return b"x"

    async def has_started(self) -> None:
        assert await asyncio.to_thread(self.started.acquire, timeout=60)


def encoder(tokenizer: Any, **options: int) -> PromptEncoder:
    return PromptEncoder(cast(Tokenizer, tokenizer), **options)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = write_model(tmp_path_factory.mktemp("model"))
    return Tokenizer(directory / "tokenizer.json")


@pytest.mark.parametrize("char", ["a", "é", "日"])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    real: Tokenizer, char: str
) -> None:
    text = char * (15_900_000 // len(char.encode()))
    started = time.process_time()
    with pytest.raises(InvalidArgumentError, match="bytes or more, at most") as caught:
        await encoder(real).encode(text, max_num_tokens=2048)
    # Of a core: 20 ms; tokenizing takes 40 s.
    assert time.process_time() - started < 10
    assert (caught.value.reason, caught.value.field) == ("PROMPT_TOO_LONG", "text")


async def test_the_bound_is_one_of_bytes(real: Tokenizer) -> None:
    longest = real.max_token_bytes
    assert longest == len("<|begin|>")
    for fits, count in ((True, 100 * longest), (False, 100 * longest + 1)):
        text = "é" * (count // 2) + "a" * (count % 2)
        if fits:
            assert len(await encoder(real).encode(text, max_num_tokens=100)) == count + 1
            continue
        with pytest.raises(InvalidArgumentError):
            await encoder(real).encode(text, max_num_tokens=100)


@pytest.mark.parametrize("size", [1, 5000, 3 * PIECE + 7])
async def test_the_ids_are_those_of_the_whole_text(real: Tokenizer, size: int) -> None:
    text = ("naïve café 日本 " * (size // 15 + 1))[:size]
    assert await encoder(real).encode(text, max_num_tokens=2 * size + 99) == real.encode(text)


async def test_an_unusually_long_text_is_counted_only_until_it_is_too_long() -> None:
    tokenizer = Slow(is_open=True)
    with pytest.raises(InvalidArgumentError, match="may have 100000") as caught:
        await encoder(tokenizer).encode("x" * (60 * PIECE), max_num_tokens=100_000)
    assert caught.value.reason == "PROMPT_TOO_LONG"
    assert tokenizer.sizes == [PIECE, PIECE]


async def test_a_text_of_usual_length_is_tokenized_once() -> None:
    tokenizer = Slow(is_open=True)
    await encoder(tokenizer).encode("x" * (2 * PIECE), max_num_tokens=PIECE)
    assert tokenizer.sizes == [2 * PIECE]


async def test_a_cancelled_caller_stops_the_work_and_frees_the_budget() -> None:
    tokenizer = Slow()
    texts = encoder(tokenizer, budget_bytes=200 * PIECE)
    caller = asyncio.create_task(texts.encode("x" * (200 * PIECE), max_num_tokens=1_000_000))
    await tokenizer.has_started()
    waiting = [asyncio.create_task(texts.encode("y" * 5000, max_num_tokens=6000)) for _ in "ab"]
    await asyncio.sleep(0.05)
    caller.cancel()
    waiting[0].cancel()
    await asyncio.gather(caller, waiting[0], return_exceptions=True)
    # The thread still holds its bytes: who waits goes on waiting until it has ended.
    assert tokenizer.sizes == [PIECE]
    for _ in range(2):
        tokenizer.gate.release()
    assert len(await waiting[1]) == 5000
    assert tokenizer.sizes == [PIECE, 5000]


async def test_texts_beyond_the_budget_wait_in_line_and_then_are_refused() -> None:
    tokenizer = Slow()
    texts = encoder(tokenizer, budget_bytes=12_000, max_waiting_bytes=12_000)
    tasks = [asyncio.create_task(texts.encode("x" * 5000, max_num_tokens=6000)) for _ in range(4)]
    for _ in range(2):
        await tokenizer.has_started()
    with pytest.raises(ResourceExhaustedError) as caught:
        await texts.encode("x" * 5000, max_num_tokens=6000)
    assert caught.value.reason == "OVERLOADED" and caught.value.retry_after_s > 0
    for _ in range(4):
        tokenizer.gate.release()
    assert [len(ids) for ids in await asyncio.gather(*tasks)] == [5000] * 4
    assert tokenizer.sizes == [5000] * 4
    # All of it is free again.
    tokenizer.gate.release()
    assert len(await texts.encode("x" * 12_000, max_num_tokens=13_000)) == 12_000


async def test_a_text_larger_than_the_budget_goes_alone() -> None:
    tokenizer = Slow(is_open=True)
    texts = encoder(tokenizer, budget_bytes=1000)
    assert len(await texts.encode("x" * 9000, max_num_tokens=9000)) == 9000


async def test_many_tokens_are_spelled_while_others_are_served() -> None:
    tokenizer = Slow()
    coming = asyncio.create_task(encoder(tokenizer).spell(range(5000), skips_special=False))
    await tokenizer.has_started()  # in a thread: here it would stand still
    assert not coming.done()
    tokenizer.gate.release()
    assert await coming == ("x" * 5000, [b"x"] * 5000)


@pytest.mark.parametrize("size", [1, 5000])
async def test_tokens_are_spelled_as_the_tokenizer_does(real: Tokenizer, size: int) -> None:
    ids = real.encode("naïve 日本 " * size)
    for skips, decode in ((True, real.decode), (False, real.decode_all)):
        text, token_bytes = await encoder(real).spell(ids, skips_special=skips)
        assert text == decode(ids) and token_bytes == list(map(real.token_bytes, ids))
    assert b"".join(token_bytes).decode() == text
