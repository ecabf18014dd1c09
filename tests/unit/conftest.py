"""Fixtures of the engine tests: tiny checkpoints, one torch thread, repeatable examples."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.engines import Models

hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, max_examples=100
)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny checkpoints, each written once."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Exactness is promised for a fixed number of threads; one is the fastest for tiny models."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
