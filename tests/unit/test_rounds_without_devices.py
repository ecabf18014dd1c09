"""Device rounds are packages that can be left out: relayed and peer rounds go on without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs in a process of its own, in which the packages cannot be imported.
_PROGRAM = """
import importlib.abc, sys
from pathlib import Path

BLOCKED = ("target_service.device_rounds", "draft_service.device_rounds")

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(BLOCKED):
            raise ModuleNotFoundError(f"{name} is left out")

sys.meta_path.insert(0, Block())

from tests.engines import SHAPES, Models, make_draft, make_target, run_plain
from tests.local_pair import LocalPair, LocalRequest
from tests.peer_pair import PeerPair, peer_rounds, close_channels

pairing = Models(Path(sys.argv[1])).pairing("eagle")
target, draft = make_target(pairing, feature_ring_mb=1), make_draft(pairing)
for make in (LocalPair, PeerPair):
    pair = make(target, draft)
    requests = [
        LocalRequest(prompt=[i + 3, 1, 4], max_new_tokens=20, shape=SHAPES[2]) for i in range(2)
    ]
    pair.run(requests)
    plain = run_plain(target, requests)
    assert [r.output for r in requests] == [r.output for r in plain], make
    assert any(path.num_draft_tokens > 1 for path in requests[0].paths), make
    if make is PeerPair:
        assert peer_rounds(pair, requests[0]) > 3
close_channels(target, draft)
assert not any(name.startswith(BLOCKED) for name in sys.modules)
print("served")
"""


@pytest.mark.timeout(120)
def test_engines_serve_without_the_packages_of_device_rounds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "served\n"), done.stderr


def test_nothing_but_the_factories_imports_the_packages() -> None:
    found = []
    for service in ("target_service", "draft_service"):
        package = f"{service}.device_rounds"
        for path in sorted(ROOT.glob(f"{service}/**/*.py")):
            is_inside = "device_rounds" in path.parts
            if not is_inside and f"from {package}" in path.read_text():
                found.append(path.relative_to(ROOT).as_posix())
    assert "target_service/engine_factory.py" in found
    assert all(path.endswith("/engine_factory.py") for path in found), found
