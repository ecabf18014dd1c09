"""Tokenizing prompts, off the event loop, within a budget of bytes; and the way back.

    longer in bytes than any prompt that fits      refused at once
    a few thousand characters                      tokenized on the spot
    else                                           in a thread, when the budget has room

Tokenizing takes seconds and a hundred times its size per megabyte, and cannot be interrupted. A
text much longer than usual is therefore counted in pieces first: that ends as soon as there are too
many tokens, or nobody waits for them any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from orchestrator.tokenizer import Tokenizer
from shared.errors import InvalidArgumentError, ResourceExhaustedError

# Shorter prompts take less time than a thread to hand them to.
_INLINE_CHARS = 4096
_PIECE_CHARS = 64 << 10
# Texts have 3 to 5 bytes per token; one of more than this many is counted first.
_USUAL_TOKEN_BYTES = 8
_NUM_THREADS = 2
_INLINE_IDS = 1024


class PromptEncoder:
    """Tokenizes the prompts of all requests, and spells tokens for those who ask.

    Args:
        budget_bytes: Text in threads at once; a longer text goes alone.
        max_waiting_bytes: Text that may wait for room in the budget.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        budget_bytes: int = 8 << 20,
        max_waiting_bytes: int = 64 << 20,
    ) -> None:
        self._tokenizer = tokenizer
        self._budget = _Budget(budget_bytes, max_waiting_bytes)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    async def encode(
        self, text: str, *, max_num_tokens: int, adds_special: bool = True
    ) -> tuple[int, ...]:
        """Tokenize a prompt; cancelling it stops the work soon.

        Args:
            max_num_tokens: Of the longest prompt that can be served.
            adds_special: Add the special tokens that the tokenizer adds by itself.
        Raises: InvalidArgumentError if the text has more tokens for certain, ResourceExhaustedError
            if too much text waits to be tokenized.
        """
        num_bytes = self._check_size(text, max_num_tokens)
        if len(text) < _INLINE_CHARS:
            return self._tokenizer.encode(text, adds_special=adds_special)
        held = await self._budget.take(num_bytes)
        stop = threading.Event()
        is_long = num_bytes > _USUAL_TOKEN_BYTES * max_num_tokens and len(text) > _PIECE_CHARS
        work = asyncio.get_running_loop().run_in_executor(
            self._threads,
            lambda: self._encode(
                text, max_num_tokens if is_long else None, stop, adds_special=adds_special
            ),
        )

        def finished(work: asyncio.Future[tuple[int, ...]]) -> None:
            self._budget.give_back(held)
            if not work.cancelled():
                work.exception()  # of a caller that is gone: nobody else looks at it

        work.add_done_callback(finished)
        try:
            return await asyncio.shield(work)  # a thread goes on when its caller is cancelled
        except asyncio.CancelledError:
            stop.set()
            raise

    async def spell(
        self, token_ids: Sequence[int], *, skips_special: bool
    ) -> tuple[str, list[bytes]]:
        """Return the text of token ids, and the bytes of each.

        Args:
            skips_special: The text is without special tokens; the bytes always spell them.
        """
        decode = self._tokenizer.decode if skips_special else self._tokenizer.decode_all

        def work() -> tuple[str, list[bytes]]:
            return decode(token_ids), list(map(self._tokenizer.token_bytes, token_ids))

        if len(token_ids) <= _INLINE_IDS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _check_size(self, text: str, max_num_tokens: int) -> int:
        """Return the size of a text in bytes, if that many can be a prompt."""
        token_bytes = self._tokenizer.max_token_bytes
        limit = max_num_tokens * token_bytes
        num_bytes = len(text) if len(text) > limit else len(text.encode())
        if num_bytes > limit:
            raise InvalidArgumentError(
                f"the prompt has {num_bytes} bytes or more, at most {limit} can fit: it may have "
                f"{max_num_tokens} tokens, none of which is longer than {token_bytes} bytes. "
                "Shorten it, or serve with a larger --max-context-len",
                reason="PROMPT_TOO_LONG",
                field="text",
            )
        return num_bytes

    def _encode(
        self,
        text: str,
        max_num_tokens: int | None,
        stop: threading.Event,
        *,
        adds_special: bool,
    ) -> tuple[int, ...]:
        """Tokenize in a thread; count in pieces first if there is a limit."""
        if max_num_tokens is not None:
            self._count(text, max_num_tokens, stop)
        if stop.is_set():
            return ()
        return self._tokenizer.encode(text, adds_special=adds_special)

    def _count(self, text: str, max_num_tokens: int, stop: threading.Event) -> None:
        """Raise InvalidArgumentError if a text has too many tokens, whatever the cuts may add."""
        most = max_num_tokens
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            if stop.is_set():
                return
            num_tokens += self._tokenizer.count(text[start : start + _PIECE_CHARS])
            most += self._tokenizer.max_token_bytes  # a token cut in two becomes at most so many
            if num_tokens > most:
                raise InvalidArgumentError(
                    f"the first {start + _PIECE_CHARS} of the prompt's {len(text)} characters have "
                    f"{num_tokens} tokens, the whole may have {max_num_tokens}; shorten it",
                    reason="PROMPT_TOO_LONG",
                    field="text",
                )


class _Budget:
    """Bytes that may be used at once; who finds none waits in line."""

    def __init__(self, num_bytes: int, max_waiting_bytes: int) -> None:
        self._num_bytes = self._num_free = num_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_bytes: int) -> int:
        """Wait for room; return what was taken, to be given back.

        Raises: ResourceExhaustedError if too much waits already.
        """
        num_bytes = min(num_bytes, self._num_bytes)
        if not self._waiters and num_bytes <= self._num_free:
            self._num_free -= num_bytes
            return num_bytes
        num_waiting = sum(size for size, _ in self._waiters)
        if num_waiting + num_bytes > self._max_waiting_bytes:
            raise ResourceExhaustedError(
                f"{num_waiting} bytes of prompts wait to be tokenized; try again later, or send "
                "token_ids",
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (num_bytes, turn)
        self._waiters.append(waiter)
        try:
            await turn
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._admit()  # the next prompt may be smaller
            else:
                self.give_back(num_bytes)
            raise
        return num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Free bytes for prompts that wait."""
        self._num_free += num_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiters and self._waiters[0][0] <= self._num_free:
            num_bytes, turn = self._waiters.popleft()
            self._num_free -= num_bytes
            turn.set_result(None)
