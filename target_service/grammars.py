"""The grammars of a target's requests. What follows them is loaded with the first one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import InvalidArgumentError
from shared.messages import TargetOpen
from shared.progress import note_progress

if TYPE_CHECKING:
    from shared.grammar.matcher import OutputMatcher

_MAX_GRAMMARS = 64


class Grammars:
    """Makes the matchers of requests.

    Args:
        directory: Of the target's checkpoint.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokens: Any = None  # xgrammar.TokenizerInfo
        self._compiled: OrderedDict[str, Any] = OrderedDict()  # xgrammar.CompiledGrammar

    @property
    def are_served(self) -> bool:
        """Return whether outputs may have grammars: tokens have texts, and one ends an output."""
        return bool(self._eos_token_ids) and (self._directory / "tokenizer.json").is_file()

    def load(self) -> None:
        """Load the library and the tokenizer: a second, once."""
        if self._tokens is None:
            note_progress(is_slow=True)
            # Not above: most targets never need it, and it takes a second.
            from shared.grammar.tokens import token_info

            self._tokens = token_info(self._directory, self._vocab_size, self._eos_token_ids)

    def matcher(self, message: TargetOpen) -> OutputMatcher | None:
        """Return what follows the output of a request; None: it has no grammar.

        Raises: InvalidArgumentError if the grammar is not there, or not that of the tokens.
        """
        if message.grammar is None:
            return None
        if not (message.compiled_grammar and self.are_served):
            raise _refusal("this target cannot follow grammars")
        self.load()
        from shared.grammar.matcher import OutputMatcher

        matcher = OutputMatcher(self._read(message.compiled_grammar))
        if not matcher.accept(message.token_ids[message.num_prompt_tokens :]):
            raise _refusal("the output that is there already does not have the grammar")
        return matcher

    def _read(self, text: str) -> Any:
        """Return what a front has compiled. Raises: InvalidArgumentError."""
        compiled = self._compiled.get(text)
        if compiled is None:
            import xgrammar

            try:
                compiled = xgrammar.CompiledGrammar.deserialize_json(text, self._tokens)
            except RuntimeError as error:
                raise _refusal(f"the grammar cannot be read: {error}") from None
            self._compiled[text] = compiled
            if len(self._compiled) > _MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(text)
        return compiled


def _refusal(problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(problem, reason="INVALID_GRAMMAR", field="structured_output")
