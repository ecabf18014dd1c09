"""What grammars must know of a model's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xgrammar
from transformers import PreTrainedTokenizerFast


def token_info(
    directory: Path, vocab_size: int, eos_token_ids: Sequence[int]
) -> xgrammar.TokenizerInfo:
    """Return the bytes of every token, and which ones end an output.

    Args:
        directory: Of a checkpoint with a tokenizer.json.
        vocab_size: Of the logits; ids past the tokenizer's are never legal.
    """
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    return xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=[*eos_token_ids]
    )
