"""Device rounds are packages that can be left out: relayed and peer rounds go on without them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs in a process of its own, in which the packages cannot be imported.
_PROGRAM = """
import importlib, importlib.abc, pkgutil, sys
from pathlib import Path

BLOCKED = ("target_service.device_rounds", "draft_service.device_rounds")

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(BLOCKED):
            raise ModuleNotFoundError(f"{name} is left out")

sys.meta_path.insert(0, Block())

import tests.conftest  # one thread
import draft_service, target_service
for service in (draft_service, target_service):
    for module in pkgutil.iter_modules(service.__path__, service.__name__ + "."):
        if not module.name.startswith(BLOCKED):
            importlib.import_module(module.name)

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


def test_engines_serve_without_the_packages_of_device_rounds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "served\n"), done.stderr


@pytest.mark.parametrize("service", ["target_service", "draft_service"])
def test_only_the_factory_imports_the_package_and_only_when_it_is_used(service: str) -> None:
    found = set()
    for path in sorted(ROOT.glob(f"{service}/**/*.py")):
        if "device_rounds" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.startswith(f"{service}.device_rounds") for name in names):
                found.add(path.name)
                assert node not in tree.body, f"{path.name} imports it whether it is used or not"
    assert found == {"engine_factory.py"}
