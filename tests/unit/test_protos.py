"""The committed stubs are what the protos generate."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_stubs_are_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="generates the stubs; CI has it")
    script = ROOT / "scripts" / "gen_protos.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    generated = tmp_path / "coppice" / "v1"
    names = sorted(path.name for path in generated.iterdir())
    committed = ROOT / "coppice" / "v1"
    assert names == sorted(path.name for path in committed.glob("*_pb2*.py*"))
    same, different, missing = filecmp.cmpfiles(generated, committed, names, shallow=False)
    assert (different, missing) == ([], []), "run `make protos` and commit coppice/v1"
    assert sorted(same) == names
