"""Text <-> token ids with the target's tokenizer.json, and nothing but `tokenizers`.

Detokenizing is incremental: a token's text is known only when its last UTF-8 byte has come.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import tokenizers

from shared.errors import ConfigError

# Bytes of text that may become one byte of a token where a normalizer changes text first.
_NORMALIZED_BYTES = 4
# A character has at most 4 bytes, so this many prompt tokens hold whatever reaches into the output.
_CONTEXT_TOKENS = 4
_MAX_CONTEXT_TOKENS = 48
# Bound on tokens without text when a decoder never settles (endless invalid UTF-8).
_MAX_UNSETTLED_TOKENS = 24
# How tokenizers with byte fallback call the token of a byte.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """Turns the tokens of one output into text, some at a time."""

    @property
    def is_settled(self) -> bool:
        """Return whether the text of every token pushed is known."""
        ...

    def push(self, *token_ids: int) -> str:
        """Return the text that these tokens complete, "" if none yet."""
        ...

    def flush(self) -> str:
        """Return what is left at the end of the output."""
        ...


class Tokenizer:
    """The tokenizer of the target model.

    Args:
        path: A tokenizer.json.
    Raises: ConfigError if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"cannot read the tokenizer {path}: {error}") from error
        # Settings of training runs; a prompt must never be cut silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self.max_token_bytes = self._longest_token()
        """Most bytes of text that one token stands for."""
        self._bytes_of: dict[int, bytes] = {}
        self._spelling_of: dict[int, bytes] = {}
        self._special_ids = frozenset(
            token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )

    def encode(self, text: str, *, adds_special: bool = True) -> tuple[int, ...]:
        """Tokenize a prompt. Any thread may: the interpreter lock is released.

        Args:
            adds_special: Add special tokens as the tokenizer's own template says.
        """
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)
        return tuple(encoding.ids)

    def count(self, text: str) -> int:
        """Return the tokens of a piece of text."""
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def detokenizer(self, prompt_ids: Sequence[int], *, keeps_special: bool = False) -> Detokenizer:
        """Return a detokenizer of what follows the prompt.

        The end of the prompt decides about a leading space, and may hold half a character.

        Args:
            keeps_special: Special tokens are spelled; else they have no text.
        """
        if self._is_byte_level:
            spell = self.token_bytes if keeps_special else self._token_bytes
            return _ByteLevelDetokenizer(spell, prompt_ids[-_CONTEXT_TOKENS:])
        decode = self.decode_all if keeps_special else self.decode
        skipped = frozenset[int]() if keeps_special else self._special_ids
        return _WindowDetokenizer(decode, prompt_ids[-_MAX_CONTEXT_TOKENS:], skipped)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of whole tokens, special ones skipped."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of whole tokens, special ones spelled."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for inside of a text; special ones are spelled."""
        known = self._spelling_of.get(token_id)
        if known is None:
            known = self._spelling_of[token_id] = self._spell_any(token_id)
        return known

    def _spell_any(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special_ids:
            return token.encode()
        if self._is_byte_level:
            return self._token_bytes(token_id)
        fallback = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(fallback[1], 16)]) if fallback else token.replace("▁", " ").encode()

    def _longest_token(self) -> int:
        in_alphabet = self._tokenizer.get_vocab(with_added_tokens=False)
        longest = max(
            # The byte alphabet has one character for each byte.
            len(token) if self._is_byte_level and token in in_alphabet else len(token.encode())
            for token in ("?", *self._tokenizer.get_vocab(with_added_tokens=True))
        )
        return longest * (1 if self._tokenizer.normalizer is None else _NORMALIZED_BYTES)

    def _token_bytes(self, token_id: int) -> bytes:
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # an added token, spelled as it is
            return token.encode()


class _ByteLevelDetokenizer:
    """Byte-level BPE: every token is a string of bytes, the output is their UTF-8 decoding."""

    def __init__(self, token_bytes: _TokenBytes, prompt_ids: Sequence[int]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.push(*prompt_ids)

    @property
    def is_settled(self) -> bool:
        return not self._decoder.getstate()[0]

    def push(self, *token_ids: int) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)  # noqa: FBT003 - codecs' own signature


class _WindowDetokenizer:
    """Any decoder: decode a short window of tokens again with each new one.

    The window starts one emission back, so that a decoder that treats the start of a text
    differently (Metaspace drops a leading space) never sees the start of the output.

    Args:
        skipped: Ids that `decode` leaves out.
    """

    def __init__(self, decode: _Decode, prompt_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window = _whole_end(decode, prompt_ids)
        self._num_read = len(self._window)
        # What the prompt left unfinished is finished by the output.
        self._text_read = decode(self._window).rstrip("�")
        self.is_settled = True

    def push(self, *token_ids: int) -> str:
        return "".join(map(self._push, token_ids))

    def _push(self, token_id: int) -> str:
        if self.is_settled and token_id in self._skipped:
            return ""  # nothing would ever shrink the window; unsettled, they count as waiting
        self._window.append(token_id)
        text = self._decode(self._window)
        num_unread = len(self._window) - self._num_read
        self.is_settled = not text.endswith("�") or num_unread > _MAX_UNSETTLED_TOKENS
        if not self.is_settled or len(text) <= len(self._text_read):
            return ""
        new_text = text[len(self._text_read) :]
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        self._text_read = self._decode(self._window)
        return new_text

    def flush(self) -> str:
        text = self._decode(self._window)[len(self._text_read) :]
        self._window.clear()
        self._num_read, self._text_read, self.is_settled = 0, "", True
        return text


def _whole_end(decode: _Decode, token_ids: Sequence[int]) -> list[int]:
    """Return the shortest end of the tokens, of a few at least, that does not begin in a character.

    With byte fallback a character cut in two spoils every character of the run of byte tokens.
    """
    for size in range(_CONTEXT_TOKENS, len(token_ids)):
        end = list(token_ids[-size:])
        if not decode(end).startswith("�"):
            return end
    return list(token_ids)


class _TokenBytes(Protocol):
    def __call__(self, token_id: int, /) -> bytes: ...


class _Decode(Protocol):
    def __call__(self, token_ids: Sequence[int], /) -> str: ...


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes stand for themselves, others for 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_of_char()
