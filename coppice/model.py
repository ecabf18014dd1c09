"""What a client is told of a model and of its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coppice.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that a server serves.

    Args:
        fingerprint: `model_fingerprint` of the PromptInfo of its requests.
        max_context_len: Longest sequence, prompt and output.
        has_tokenizer: Else prompts are token ids, and there is no text.
        chat_templates: Jinja templates of the checkpoint by name, "default" and others.
        special_tokens: Texts of named special tokens: bos_token, eos_token, ...
        can_speculate: Some draft fits some target.
        started_s: When the server was started, seconds since 1970.
    """

    name: str
    fingerprint: str
    max_context_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    can_speculate: bool
    started_s: int

    @classmethod
    def of(cls, card: pb.ModelCard) -> ServedModel:
        """Return what a message says."""
        return cls(
            name=card.name,
            fingerprint=card.model_fingerprint,
            max_context_len=card.max_context_len,
            vocab_size=card.vocab_size,
            eos_token_ids=tuple(card.eos_token_ids),
            has_tokenizer=card.has_tokenizer,
            chat_templates=dict(card.chat_templates),
            special_tokens=dict(card.special_tokens),
            can_speculate=card.can_speculate,
            started_s=card.started_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """What token ids stand for.

    Args:
        token_bytes: Of each token; half a character of some. Special tokens are spelled.
    """

    text: str
    token_bytes: tuple[bytes, ...]

    @classmethod
    def of(cls, response: pb.DetokenizeResponse) -> TokenText:
        """Return what a message says."""
        return cls(text=response.text, token_bytes=tuple(response.token_bytes))
