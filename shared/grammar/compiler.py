"""Compile grammars without anybody waiting for it: in processes that may be killed. Torch-free."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from shared.errors import CoppiceError, InvalidArgumentError, UnavailableError
from shared.grammar.source import Grammar

logger = logging.getLogger(__name__)

NUM_PROCESSES = 2  # one goes on while another is busy with what will be refused
COMPILE_TIMEOUT_S = 10.0
START_TIMEOUT_S = 120.0
MAX_COMPILED_BYTES = 1 << 22
CACHE_BYTES = 1 << 26
REFUSED_FOR_S = 300.0
"""How long a refusal is remembered: what took too long may be quick another day."""
_MAX_REFUSALS = 1024
_ATTEMPTS = 2  # a process may die for other reasons than its grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSource:
    """Whose tokens grammars are about; as of `token_info`."""

    directory: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarCompiler:
    """Compiles grammars one after the other, and remembers what came of it.

    Processes are started when they are first needed, which takes some seconds.

    Args:
        timeout_s: Of one grammar; whoever takes longer is refused, and its process killed.
    """

    def __init__(self, source: TokenSource, *, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        self._source = source
        self._timeout_s = timeout_s
        self._idle: list[_Process] = []
        self._turns = asyncio.Semaphore(NUM_PROCESSES)
        self._pending: dict[Grammar, asyncio.Task[bytes]] = {}
        self._compiled: OrderedDict[Grammar, bytes] = OrderedDict()
        self._refused: OrderedDict[Grammar, tuple[str, float]] = OrderedDict()  # until when
        self._num_bytes = 0

    def known(self, grammar: Grammar) -> bytes | None:
        """Return a compiled grammar if it is here; None: it has to be compiled first."""
        compiled = self._compiled.get(grammar)
        if compiled is not None:
            self._compiled.move_to_end(grammar)
        return compiled

    async def compile(self, grammar: Grammar) -> bytes:
        """Return a compiled grammar; equal ones are compiled once.

        Raises: InvalidArgumentError if it cannot be, UnavailableError if the process does not run.
        """
        compiled = self.known(grammar)
        if compiled is not None:
            return compiled
        message, until_s = self._refused.get(grammar, ("", 0.0))
        if time.monotonic() < until_s:
            raise _refusal(message)
        task = self._pending.get(grammar)
        if task is None:
            task = self._pending[grammar] = asyncio.create_task(self._compile(grammar))
            task.add_done_callback(lambda task: self._settle(grammar, task))
        return await asyncio.shield(task)

    async def start_process(self) -> None:
        """Have a process ready for the first grammar. Raises: UnavailableError."""
        async with self._process():
            pass

    async def close(self) -> None:
        """End the processes."""
        tasks = [*self._pending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end_idle()

    def _settle(self, grammar: Grammar, task: asyncio.Task[bytes]) -> None:
        del self._pending[grammar]
        if not task.cancelled():
            task.exception()  # whoever asked has gone, perhaps: then nobody else looks at it

    async def _compile(self, grammar: Grammar) -> bytes:
        try:
            compiled = await self._attempt(grammar)
        except InvalidArgumentError as error:
            self._refused[grammar] = error.message, time.monotonic() + REFUSED_FOR_S
            while len(self._refused) > _MAX_REFUSALS:
                self._refused.popitem(last=False)
            raise
        self._compiled[grammar] = compiled
        self._num_bytes += _size(grammar, compiled)
        while self._num_bytes > CACHE_BYTES:
            self._num_bytes -= _size(*self._compiled.popitem(last=False))
        return compiled

    async def _attempt(self, grammar: Grammar) -> bytes:
        for _ in range(_ATTEMPTS):
            async with self._process() as process:
                with contextlib.suppress(_ProcessDiedError):
                    return await process.compile(grammar, self._timeout_s)
            await self._end_idle()  # what killed it may have killed them as well
        raise _invalid("it takes too much memory to compile; simplify it")

    async def _end_idle(self) -> None:
        idle, self._idle = self._idle, []
        for process in idle:
            await process.kill()

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[_Process]:
        """Lend a process; one that was killed meanwhile does not come back."""
        async with self._turns:
            self._idle = [process for process in self._idle if process.is_alive]
            process = self._idle.pop() if self._idle else await _Process.start(self._source)
            try:
                yield process
            except asyncio.CancelledError:
                await process.kill()
                raise
            finally:
                if process.is_alive:
                    self._idle.append(process)


class _ProcessDiedError(Exception):
    """A process that compiled has died of it, or of something else."""


class _Process:
    """A process of `compile_main`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._is_killed = False

    @property
    def is_alive(self) -> bool:
        return not self._is_killed and self._process.returncode is None

    @classmethod
    async def start(cls, source: TokenSource) -> _Process:
        """Raises: UnavailableError if it does not get ready."""
        numbers = [source.vocab_size, *source.eos_token_ids]
        process = cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "shared.grammar.compile_main", str(os.getpid())),
                *(str(source.directory), *map(str, numbers)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_COMPILED_BYTES * 4 // 3,
            )
        )
        try:
            await process._answer(START_TIMEOUT_S)
        except (EOFError, TimeoutError) as error:
            await process.kill()
            logger.error("the process that compiles grammars does not start: %r", error)
            raise UnavailableError(
                "structured output is not to be had: the process that compiles grammars does not "
                "start; the orchestrator's log says why",
                reason="GRAMMAR_COMPILER",
                field="structured_output",
            ) from error
        except asyncio.CancelledError:
            await process.kill()
            raise
        return process

    async def compile(self, grammar: Grammar, timeout_s: float) -> bytes:
        """Raises: InvalidArgumentError, the process may be dead then, or _ProcessDiedError."""
        assert self._process.stdin is not None
        order = json.dumps({"kind": int(grammar.kind), "source": grammar.source}) + "\n"
        try:
            self._process.stdin.write(order.encode())
            answer = await self._answer(timeout_s)
        except TimeoutError:
            await self.kill()
            raise _invalid(
                f"it takes longer than {timeout_s:g} s to compile; simplify it"
            ) from None
        except (EOFError, ConnectionError):
            await self.kill()
            raise _ProcessDiedError from None
        except ValueError:  # a line beyond the limit
            await self.kill()
            raise _invalid("it is too large once compiled; simplify it") from None
        if "error" in answer:
            raise _invalid(answer["error"])
        return base64.b64decode(answer["compiled"])

    async def kill(self) -> None:
        self._is_killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _answer(self, timeout_s: float) -> dict[str, str]:
        """Raises: TimeoutError, EOFError, or ValueError for an answer that is too long."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        if not line:
            raise EOFError
        answer: dict[str, str] = json.loads(line)
        return answer


def _invalid(problem: str) -> CoppiceError:
    return _refusal(f"structured_output cannot be followed: {problem}")


def _refusal(message: str) -> CoppiceError:
    return InvalidArgumentError(
        message,
        reason="INVALID_GRAMMAR",
        field="structured_output",
    )


def _size(grammar: Grammar, compiled: bytes) -> int:
    return len(grammar.source) + len(compiled)
