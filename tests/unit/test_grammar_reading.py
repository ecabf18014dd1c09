"""Compiled grammars are read beside the steps of an engine: in a thread, and each one once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.errors import InvalidArgumentError
from shared.grammar import grammars as module
from shared.grammar.grammars import Grammars
from shared.messages import DraftOpen, SamplingParams
from tests.checkpoints import EOS_ID, VOCAB_SIZE
from tests.engines import Models, make_draft, make_target
from tests.grammars import compiled_for
from tests.unit.test_engine_grammar import open_of


@pytest.fixture
def directory(models: Models) -> Path:
    return models.pairing("standalone").target


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was read, all of it taken for large."""
    read: list[bytes] = []
    read_new = Grammars._read_new

    def note(self: Grammars, data: bytes) -> Any:
        read.append(data)
        return read_new(self, data)

    monkeypatch.setattr(Grammars, "_read_new", note)
    monkeypatch.setattr(module, "SMALL_BYTES", 0)
    return read


def make_grammars(directory: Path) -> Grammars:
    return Grammars(directory, VOCAB_SIZE, (EOS_ID,))


def test_a_grammar_is_read_once_for_all_who_open_with_it(
    directory: Path, reads: list[bytes]
) -> None:
    grammars, data = make_grammars(directory), compiled_for(directory, "schema")
    begun = grammars.begin(data)
    assert begun is not None and grammars.begin(data) in (begun, None)
    begun.result()
    assert grammars.begin(data) is None
    for _ in range(2):
        assert grammars.matcher(data, ()).accept(())
        assert grammars.begin(data) is None
    assert reads == [data]


def test_who_does_not_wait_has_the_grammar_too(directory: Path, reads: list[bytes]) -> None:
    grammars, data = make_grammars(directory), compiled_for(directory, "schema")
    assert grammars.begin(data) is not None
    assert grammars.matcher(data, ()).accept(())
    assert reads == [data]


def test_small_grammars_are_read_at_once_after_the_first(directory: Path) -> None:
    grammars = make_grammars(directory)
    first = grammars.begin(compiled_for(directory, "schema"))
    assert first is not None
    first.result()
    assert grammars.begin(compiled_for(directory, "regex")) is None


def test_what_is_no_grammar_is_refused_by_whoever_opens(directory: Path) -> None:
    grammars = make_grammars(directory)
    begun = grammars.begin(b"nonsense")
    assert begun is not None
    assert isinstance(begun.exception(), InvalidArgumentError)
    assert grammars.begin(b"nonsense") is None
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="cannot be read"):
            grammars.matcher(b"nonsense", ())


def test_nothing_is_begun_without_a_grammar_or_a_tokenizer(directory: Path, tmp_path: Path) -> None:
    assert make_grammars(directory).begin(b"") is None
    assert make_grammars(tmp_path).begin(b"nonsense") is None


def test_engines_prepare_what_opens_requests(models: Models) -> None:
    pairing = models.pairing("standalone")
    target, draft = make_target(pairing), make_draft(pairing)
    message = open_of(pairing.target, "schema")
    grammar = {"compiled_grammar": message.compiled_grammar, "num_prompt_tokens": 2}
    opening = DraftOpen(
        request_id="r1", target_epoch=1, draft_epoch=1, target_address="", token_ids=(1, 2),
        sampling=SamplingParams(), **grammar,
    )  # fmt: skip
    for engine, opens in ((target, message), (draft, opening)):
        begun = engine.prepare(opens)
        assert begun is not None
        begun.result()
        assert engine.prepare(opens) is None
        assert engine.prepare("go") is None
