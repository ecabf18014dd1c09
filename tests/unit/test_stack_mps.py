"""MPS for workers that share a GPU: who gets it, and that nothing of it outlives the stack."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from coppice.stack import Stack
from coppice.stack.config import StackConfig
from coppice.stack.gpus import shared_gpus
from coppice.stack.mps import CONTROL, MultiProcessService
from coppice.stack.process import ServiceProcess

PIPE = "CUDA_MPS_PIPE_DIRECTORY"
# Writes down what it was called with and for which directory; `quit` comes on its standard input.
DAEMON = f"""#!/bin/sh
echo "$@ $(test "$1" || cat) ${PIPE} $CUDA_VISIBLE_DEVICES" >> "$CALLS"
exit $STATUS
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a daemon on the path; return where its calls are written down."""
    control = tmp_path / "bin" / CONTROL
    control.parent.mkdir()
    control.write_text(DAEMON)
    control.chmod(0o755)
    calls = tmp_path / "calls"
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("STATUS", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv(PIPE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return calls


def directories(folder: Path) -> list[Path]:
    return list(folder.glob("coppice-mps-*"))


def test_a_daemon_of_its_own(calls: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    service = MultiProcessService(lines.append)
    assert service.environ == {}
    service.start()
    (directory,) = directories(tmp_path)
    assert service.environ[PIPE] == str(directory)
    assert directory.stat().st_mode & 0o777 == 0o700, "it is nobody else's"
    service.stop()
    assert calls.read_text().split("\n")[:2] == [f"-d  {directory} ", f" quit {directory} "]
    assert service.environ == {} and directories(tmp_path) == []
    assert lines == ["workers that share a GPU share its time, too, by MPS"]


def test_a_daemon_that_does_not_start_is_done_without(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATUS", "1")
    lines: list[str] = []
    service = MultiProcessService(lines.append)
    service.start()
    service.stop()
    assert service.environ == {} and directories(tmp_path) == []
    assert len(lines) == 1 and f"{CONTROL} -d failed" in lines[0]
    assert len(calls.read_text().splitlines()) == 1


def test_a_machine_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(PIPE, raising=False)
    lines: list[str] = []
    service = MultiProcessService(lines.append)
    service.start()
    assert service.environ == {}
    assert lines == [f"no {CONTROL} here: workers that share a GPU take turns"]


def test_what_a_user_has_started_is_used(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PIPE, "/run/mine")
    service = MultiProcessService(lambda _: None)
    service.start()
    service.stop()
    assert service.environ == {} and not calls.exists(), "workers inherit the user's"


def test_gpus_that_several_workers_are_given() -> None:
    assert shared_gpus(["0", "1", "0", "", ""]) == {"0"}
    assert shared_gpus(["0", "1"]) == set()


@pytest.mark.parametrize("workers", [{"target-1", "draft-0"}, set()])
def test_workers_that_share_a_gpu_are_told(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: set[str]
) -> None:
    environs: dict[str, dict[str, str]] = {}

    def start(service: ServiceProcess) -> None:
        environs[service.name] = service.environ
        if len(environs) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(ServiceProcess, "start", start)
    config = StackConfig(num_targets=2, target_gpus=("0", "1"), draft_gpus=("1",))
    with pytest.raises(KeyboardInterrupt):
        Stack(replace(config, mps=bool(workers))).start()
    has_mps = {name for name, environ in environs.items() if PIPE in environ}
    assert has_mps == workers
    assert calls.exists() is bool(workers) and directories(tmp_path) == []
