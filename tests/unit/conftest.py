"""Fixtures of the engine tests: tiny checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device_pair import Make, device_engines
from tests.engines import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny checkpoints, each written once."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def patient_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave masks of trees all the time that they take: a thread may have to wait for a core."""
    monkeypatch.setattr("shared.grammar.matcher.TREE_BUDGET_S", 60.0)
    monkeypatch.setattr("draft_service.growth_masks.BUDGET_S", 60.0)


@pytest.fixture
def make(models: Models) -> Iterator[Make]:
    """Return what makes a target with a mailbox and a draft."""
    with device_engines(models) as make:
        yield make
