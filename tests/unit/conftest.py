"""Fixtures of the engine tests: tiny checkpoints, repeatable examples."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from tests.device_pair import Make, device_engines
from tests.engines import Models

hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, max_examples=100
)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny checkpoints, each written once."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def make(models: Models) -> Iterator[Make]:
    """Return what makes a target with a mailbox and a draft."""
    with device_engines(models) as make:
        yield make
