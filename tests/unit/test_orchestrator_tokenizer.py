"""Incremental detokenizing equals decoding at once, for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from orchestrator.tokenizer import Detokenizer, Tokenizer
from shared.errors import ConfigError

CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "The quick brown fox jumps over the lazy dog, twice: naïve café.",
    "日本語のテキスト と emoji 😀🎉 mixed in",
] * 4


class Loaded(Tokenizer):
    """The orchestrator's tokenizer of a file, and the library's ids of tokens."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.token_to_id = tokenizers.Tokenizer.from_file(str(path)).token_to_id


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Return a byte-level BPE tokenizer as Llama 3 and Qwen have it, with added tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Not special, and not spelled in the byte alphabet.
    tokenizer.add_tokens(["<|tööl call|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    tokenizer.enable_truncation(5)
    return _saved(tokenizer, tmp_path_factory)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Return a Metaspace tokenizer with byte fallback as Llama 2 and Mistral have it."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for char in sorted(set("".join(CORPUS[:2]).replace(" ", "▁").replace("\n", ""))):
        vocab[char] = len(vocab)
    for piece in ("▁t", "▁th", "▁the", "▁q", "re", "▁re", "ju", "fo"):
        vocab[piece] = len(vocab)
    merges = [
        ("▁", "t"),
        ("▁t", "h"),
        ("▁th", "e"),
        ("▁", "q"),
        ("r", "e"),
        ("▁", "re"),
        ("j", "u"),
        ("f", "o"),
    ]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return _saved(tokenizer, tmp_path_factory)


def _saved(tokenizer: tokenizers.Tokenizer, factory: pytest.TempPathFactory) -> Loaded:
    path = factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return Loaded(path)


def _stream(detokenizer: Detokenizer, token_ids: Sequence[int]) -> str:
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


@given(token_ids=st.lists(st.integers(0, 400), max_size=40))
def test_byte_level_equals_decoding_at_once_for_any_ids(
    byte_level: Loaded, token_ids: list[int]
) -> None:
    """Random ids are mostly invalid UTF-8: replacement characters must agree, too."""
    assert _stream(byte_level.detokenizer([]), token_ids) == byte_level.decode(token_ids)


@given(text=st.text(max_size=40))
def test_byte_level_round_trip_and_no_half_characters(byte_level: Loaded, text: str) -> None:
    """Every piece is whole: the replacement character appears only if the text has it."""
    detokenizer = byte_level.detokenizer([])
    pieces = [detokenizer.push(token_id) for token_id in byte_level.encode(text)]
    assert detokenizer.is_settled
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text


@given(text=st.text(alphabet=" theqrjufo naïé😀日本", max_size=30))
def test_metaspace_equals_decoding_at_once(metaspace: Loaded, text: str) -> None:
    """Byte fallback may split a character over four tokens; a leading space is dropped once."""
    token_ids = metaspace.encode(text)
    assert _stream(metaspace.detokenizer([]), token_ids) == metaspace.decode(token_ids)


@given(text=st.text(alphabet="theqrjufo naé😀", min_size=2, max_size=30), data=st.data())
def test_metaspace_output_continues_its_prompt(
    metaspace: Loaded, text: str, data: st.DataObject
) -> None:
    """The space between prompt and output belongs to the output."""
    token_ids = metaspace.encode(text)
    cut = data.draw(st.integers(1, len(token_ids)))
    prompt = metaspace.decode(token_ids[:cut])
    if prompt.endswith("�"):
        return  # the prompt ends inside a character: see the next test
    output = _stream(metaspace.detokenizer(token_ids[:cut]), token_ids[cut:])
    assert prompt + output == metaspace.decode(token_ids)


def test_a_character_split_over_four_tokens_comes_whole(byte_level: Loaded) -> None:
    """Nothing of an emoji leaves before its last byte."""
    ids = [byte_level.token_to_id(char) for char in ("ð", "Ł", "İ", "Ĭ")]
    detokenizer = byte_level.detokenizer([])
    pieces, settled = [], []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        settled.append(detokenizer.is_settled)
    assert pieces == ["", "", "", "🎊"]
    assert settled == [False, False, False, True]


def test_output_completes_a_character_that_the_prompt_began(
    byte_level: Loaded, metaspace: Loaded
) -> None:
    """A prompt of ids may end anywhere."""
    first, second = (byte_level.token_to_id(char) for char in ("Ã", "©"))
    assert byte_level.detokenizer([first]).push(second) == "é"
    first, second = (metaspace.token_to_id(char) for char in ("<0xC3>", "<0xA9>"))
    assert metaspace.detokenizer([first]).push(second) == "é"


def test_special_tokens_have_no_text_and_added_ones_do(byte_level: Loaded) -> None:
    """`<|end|>` is special; the tool token is text of the model."""
    end = byte_level.token_to_id("<|end|>")
    tool = byte_level.token_to_id("<|tööl call|>")
    assert _stream(byte_level.detokenizer([]), [end, tool, end]) == "<|tööl call|>"
    assert byte_level.decode([end, tool, end]) == "<|tööl call|>"


def test_prompts_get_the_templates_special_tokens_and_are_never_truncated(
    byte_level: Loaded,
) -> None:
    """A tokenizer.json may carry the truncation of its training run."""
    short = byte_level.encode("def")
    assert short[0] == 0
    long = byte_level.encode("def add(a, b):\n" * 1000)
    assert len(long) > 5000
    assert long[0] == 0 and 0 not in long[1:]


def test_endless_invalid_utf8_is_not_held_forever(metaspace: Loaded) -> None:
    """A decoder that never settles gives up waiting after a bounded number of tokens."""
    lone = metaspace.token_to_id("<0xF0>")
    detokenizer = metaspace.detokenizer([])
    text = "".join(detokenizer.push(lone) for _ in range(100))
    assert set(text) == {"�"}


@given(data=st.data())
def test_special_tokens_change_nothing_of_the_text_around_them(
    metaspace: Loaded, data: st.DataObject
) -> None:
    """Wherever they come, inside of a character, too."""
    pieces = st.one_of(
        st.sampled_from([1, 2]),  # <s> and </s>
        st.integers(3, 258),  # bytes
        st.sampled_from(metaspace.encode("the quick fox jumps")),
        st.just(metaspace.encode("é😀")[1:]),
    )
    token_ids: list[int] = []
    for piece in data.draw(st.lists(pieces, max_size=20)):
        token_ids += [piece] if isinstance(piece, int) else piece
    prompt = metaspace.encode("def add")
    plain = [token_id for token_id in token_ids if token_id not in (1, 2)]
    expected = _stream(metaspace.detokenizer(prompt), plain)
    assert _stream(metaspace.detokenizer(prompt), token_ids) == expected


def test_many_special_tokens_cost_no_more_each_than_one(
    metaspace: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output that goes on past its end may have nothing else."""
    sizes: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        sizes.append(len(token_ids))
        return Tokenizer.decode(metaspace, token_ids)

    monkeypatch.setattr(metaspace, "decode", decode)
    detokenizer = metaspace.detokenizer(metaspace.encode("def add"))
    end, *emoji = metaspace.token_to_id("</s>"), *metaspace.encode("😀")[1:]
    assert _stream(detokenizer, [end] * 1000 + emoji) == "😀"
    detokenizer = metaspace.detokenizer(metaspace.encode("def add"))
    unfinished = [*emoji[:1], *[end] * 1000]
    assert "".join(map(detokenizer.push, unfinished)) == "�", "not held for ever"
    assert max(sizes) < 50


def test_an_unreadable_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    """The message names the file."""
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer.json"):
        Tokenizer(path)


@given(text=st.text(max_size=30))
def test_bytes_of_tokens_spell_the_text(byte_level: Loaded, text: str) -> None:
    ids = byte_level.encode(text, adds_special=False)
    assert b"".join(map(byte_level.token_bytes, ids)).decode() == text


def test_bytes_of_tokens_with_byte_fallback_and_of_special_ones(
    byte_level: Loaded, metaspace: Loaded
) -> None:
    ids = metaspace.encode("the quick 😀", adds_special=False)
    assert b"".join(map(metaspace.token_bytes, ids)).decode() == " the quick 😀"
    assert metaspace.token_bytes(metaspace.token_to_id("<s>")) == b"<s>"
    assert metaspace.token_bytes(metaspace.token_to_id("<0x0A>")) == b"\n"
    assert byte_level.token_bytes(byte_level.token_to_id("<|end|>")) == b"<|end|>"
    assert byte_level.token_bytes(byte_level.token_to_id("<|tööl call|>")).decode() == (
        "<|tööl call|>"
    )
    assert byte_level.token_bytes(10**6) == b""


@given(token_ids=st.lists(st.integers(0, 300), max_size=30))
def test_special_tokens_are_kept_if_that_is_asked_for(
    byte_level: Loaded, token_ids: list[int]
) -> None:
    kept = _stream(byte_level.detokenizer([], keeps_special=True), token_ids)
    assert kept == byte_level.decode_all(token_ids)
    ends = ["<|begin|>", "<|end|>"]
    count = sum(token_ids.count(byte_level.token_to_id(name)) for name in ends)
    assert sum(kept.count(name) for name in ends) >= count


def test_special_tokens_are_added_unless_they_are_there(byte_level: Loaded) -> None:
    begin = byte_level.token_to_id("<|begin|>")
    plain = byte_level.encode("ab", adds_special=False)
    assert byte_level.encode("ab") == (begin, *plain)
    assert byte_level.encode("<|begin|>ab", adds_special=False) == (begin, *plain)
