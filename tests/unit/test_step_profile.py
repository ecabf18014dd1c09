"""A recording of an engine's steps, and what operators see of a configuration."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.config import TargetConfig
from shared.config.values import HIDDEN, shown_values
from shared.step.profile import StepProfile


def test_a_recording_has_the_operators_of_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "new" / "target.json.gz"
    profile = StepProfile(str(path), 2)
    assert not profile.note_step()
    torch.ones(3, 3) @ torch.ones(3, 3)
    assert profile.note_step()
    assert profile.write() == ""
    with gzip.open(path) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_said_and_nothing_else_happens(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    profile = StepProfile(str(tmp_path / "file" / "target.json.gz"), 1)
    assert profile.note_step()
    assert "file" in profile.write()
    assert StepProfile(str(tmp_path / "again.json.gz"), 1).write() == ""


@dataclass(frozen=True)
class _Config:
    peer_secret: str = "hush"
    admin_token: str = ""
    token_file: str = "/etc/token"
    num_draft_tokens: int = 8


def test_secrets_of_a_configuration_are_not_shown() -> None:
    assert shown_values(_Config()) == {
        "peer_secret": HIDDEN,
        "admin_token": "",
        "token_file": "/etc/token",
        "num_draft_tokens": "8",
    }
    assert shown_values(TargetConfig())["page_size"] == "16"
