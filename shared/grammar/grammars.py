"""The grammars of an engine's requests. What follows them is loaded with the first one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import InvalidArgumentError
from shared.progress import note_progress

if TYPE_CHECKING:
    from shared.grammar.matcher import OutputMatcher, Vocabulary

_MOST_BYTES = 1 << 28
SMALL_BYTES = 1 << 14
"""A compiled grammar of so many bytes is read in 3 ms; one of 2.4 MB takes 240."""


class Grammars:
    """Makes the matchers of requests.

    Args:
        directory: Of the target's checkpoint.
        vocab_size: Of the target's logits.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[bytes, Any] = OrderedDict()  # xgrammar.CompiledGrammar
        self._num_bytes = 0
        self._is_loading = threading.Lock()
        self._reader: ThreadPoolExecutor | None = None
        self._begun: dict[bytes, Future[Any]] = {}

    @property
    def are_served(self) -> bool:
        """Return whether outputs may have grammars: tokens have texts, and one ends an output."""
        return bool(self._eos_token_ids) and (self._directory / "tokenizer.json").is_file()

    def load(self) -> Vocabulary:
        """Load the library and the tokenizer, which takes a second, unless they are."""
        if self._vocabulary is None:
            note_progress(is_slow=True)
            with self._is_loading:
                if self._vocabulary is None:
                    # Not above: most engines never need it.
                    from shared.grammar.matcher import Vocabulary
                    from shared.grammar.tokens import token_info

                    info = token_info(self._directory, self._vocab_size, self._eos_token_ids)
                    self._vocabulary = Vocabulary(info)
        return self._vocabulary

    def begin(self, data: bytes) -> Future[Any] | None:
        """Begin to read a compiled grammar in a thread, and to load the library if it is not.

        Returns: what is done once `matcher` no longer waits for that, even if it will raise; None:
            it does not now.
        """
        if not (data and self.are_served) or data in self._compiled:
            return None
        if self._vocabulary is not None and len(data) <= SMALL_BYTES:
            return None
        begun = self._begun.get(data)
        if begun is not None and begun.done():
            del self._begun[data]
            if begun.exception() is None:
                self._keep(data, begun.result())
            return None
        if begun is not None:
            return begun
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "grammars")
        begun = self._begun[data] = self._reader.submit(self._read_new, data)
        return begun

    def matcher(self, compiled_grammar: bytes, output: Sequence[int]) -> OutputMatcher:
        """Return what follows an output.

        Args:
            compiled_grammar: As of `compile_grammar`.
            output: Tokens that are there already.
        Raises: InvalidArgumentError if they do not have the grammar, or it is none.
        """
        if not self.are_served:
            raise _refusal("this worker cannot follow grammars")
        compiled = self._read(compiled_grammar)
        from shared.grammar.matcher import OutputMatcher

        matcher = OutputMatcher(compiled, self.load())
        if not matcher.accept(output):
            raise _refusal("the output that is there already does not have the grammar")
        return matcher

    def _read(self, data: bytes) -> Any:
        """Return what was compiled, and keep it. Raises: InvalidArgumentError."""
        compiled = self._compiled.get(data)
        if compiled is None:
            begun = self._begun.pop(data, None)
            compiled = self._read_new(data) if begun is None else begun.result()
            self._keep(data, compiled)
        self._compiled.move_to_end(data)
        return compiled

    def _keep(self, data: bytes, compiled: Any) -> None:
        self._compiled[data] = compiled
        self._num_bytes += compiled.memory_size_bytes
        while self._num_bytes > _MOST_BYTES and len(self._compiled) > 1:
            _, oldest = self._compiled.popitem(last=False)
            self._num_bytes -= oldest.memory_size_bytes

    def _read_new(self, data: bytes) -> Any:
        """Return what was compiled, in any thread. Raises: InvalidArgumentError."""
        info = self.load().info
        from shared.grammar.compile import read_compiled

        return read_compiled(data, info)


def _refusal(problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(problem, reason="INVALID_GRAMMAR", field="structured_output")
