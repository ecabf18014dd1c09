"""What holds in every contract test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _patient_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no front of this process take a fake engine for hung that a test has paused.

    A test of hung engines gives its front a limit of its own; processes have the usual one.
    """
    monkeypatch.setattr("shared.rpc.engine_watch.FLOOR_S", 60.0)
