"""The grammars of an engine's requests. What follows them is loaded with the first one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import InvalidArgumentError
from shared.progress import note_progress

if TYPE_CHECKING:
    from shared.grammar.matcher import OutputMatcher, Vocabulary

_MOST_BYTES = 1 << 28


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

    @property
    def are_served(self) -> bool:
        """Return whether outputs may have grammars: tokens have texts, and one ends an output."""
        return bool(self._eos_token_ids) and (self._directory / "tokenizer.json").is_file()

    def load(self) -> Vocabulary:
        """Load the library and the tokenizer, which takes a second, unless they are."""
        if self._vocabulary is None:
            note_progress(is_slow=True)
            # Not above: most engines never need it.
            from shared.grammar.matcher import Vocabulary
            from shared.grammar.tokens import token_info

            info = token_info(self._directory, self._vocab_size, self._eos_token_ids)
            self._vocabulary = Vocabulary(info)
        return self._vocabulary

    def matcher(self, compiled_grammar: bytes, output: Sequence[int]) -> OutputMatcher:
        """Return what follows an output.

        Args:
            compiled_grammar: As of `compile_grammar`.
            output: Tokens that are there already.
        Raises: InvalidArgumentError if they do not have the grammar, or it is none.
        """
        if not self.are_served:
            raise _refusal("this worker cannot follow grammars")
        vocabulary = self.load()
        from shared.grammar.matcher import OutputMatcher

        matcher = OutputMatcher(self._read(compiled_grammar, vocabulary), vocabulary)
        if not matcher.accept(output):
            raise _refusal("the output that is there already does not have the grammar")
        return matcher

    def _read(self, data: bytes, vocabulary: Vocabulary) -> Any:
        """Return what was compiled. Raises: InvalidArgumentError."""
        compiled = self._compiled.get(data)
        if compiled is None:
            from shared.grammar.compile import read_compiled

            compiled = read_compiled(data, vocabulary.info)
            self._compiled[data] = compiled
            self._num_bytes += compiled.memory_size_bytes
            while self._num_bytes > _MOST_BYTES and len(self._compiled) > 1:
                _, oldest = self._compiled.popitem(last=False)
                self._num_bytes -= oldest.memory_size_bytes
        self._compiled.move_to_end(data)
        return compiled


def _refusal(problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(problem, reason="INVALID_GRAMMAR", field="structured_output")
