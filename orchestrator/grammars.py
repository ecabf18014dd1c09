"""The grammars of outputs, compiled for the tokens of what is served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from shared.errors import CoppiceError
from shared.grammar.compiler import GrammarCompiler, TokenSource
from shared.grammar.source import Grammar
from shared.messages import WorkerInfo

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0


class Grammars:
    """Compiles what requests ask for.

    Args:
        directory: Of the checkpoint whose tokenizer is the targets'.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._compiler: tuple[TokenSource, GrammarCompiler] | None = None
        self._retired: list[GrammarCompiler] = []

    async def compile(self, grammar: Grammar, model: WorkerInfo) -> bytes:
        """Return what workers need of a grammar.

        Raises: InvalidArgumentError if it cannot be followed, or UnavailableError.
        """
        return await self._compiler_of(model).compile(grammar)

    async def prepare(self, model: Callable[[], WorkerInfo | None], after_s: float) -> None:
        """Have a process ready for the first grammar, some time after there is a model."""
        while (info := model()) is None:
            await asyncio.sleep(_LOOK_INTERVAL_S)
        await asyncio.sleep(after_s)
        if info.has_grammars:
            with contextlib.suppress(CoppiceError):  # the first request says it
                await self._compiler_of(info).start_process()

    async def close(self) -> None:
        """End the processes."""
        if self._compiler is not None:
            self._retired.append(self._compiler[1])
        for compiler in self._retired:
            await compiler.close()

    def _compiler_of(self, model: WorkerInfo) -> GrammarCompiler:
        source = TokenSource(
            directory=self._directory,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )
        if self._compiler is None or self._compiler[0] != source:
            if self._compiler is not None:  # another model is served now
                self._retired.append(self._compiler[1])
            self._compiler = source, GrammarCompiler(source)
        return self._compiler[1]
