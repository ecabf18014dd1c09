"""A draft runs relayed and peer rounds without the package of device rounds."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "draft_service.device_rounds"

WITHOUT = f"""
import importlib, pkgutil, random, sys
from pathlib import Path

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith({PACKAGE!r}):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
import draft_service
for module in pkgutil.iter_modules(draft_service.__path__, "draft_service."):
    if module.name != {PACKAGE!r}:
        importlib.import_module(module.name)

from tests.engines import SHAPES, Models, fresh, make_draft, make_target, random_tokens, run_plain
from tests.local_pair import LocalPair, LocalRequest
from tests.peer_pair import PeerPair, peer_rounds, close_channels

pairing = Models(Path(sys.argv[1])).pairing("eagle")
target, draft = make_target(pairing, feature_ring_mb=1), make_draft(pairing)
rng = random.Random(1)
requests = [
    LocalRequest(prompt=random_tokens(rng, 5 + i), max_new_tokens=12, shape=SHAPES[2])
    for i in range(2)
]
plain = [request.output for request in run_plain(target, requests)]

relayed = [fresh(request) for request in requests]
LocalPair(target, draft).run(relayed)
assert [request.output for request in relayed] == plain
assert all(len(request.trees) == len(request.paths) - 1 for request in relayed)

pair = PeerPair(target, draft)
pair.run(requests)
assert [request.output for request in requests] == plain
assert all(peer_rounds(pair, request) for request in requests)
close_channels(target, draft)
assert not any(name.startswith({PACKAGE!r}) for name in sys.modules)
"""


@pytest.mark.timeout(120)
def test_relayed_and_peer_rounds_need_no_device_rounds(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_only_the_factory_imports_device_rounds_and_only_when_they_are_used() -> None:
    found = set()
    for path in sorted((ROOT / "draft_service").glob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.startswith(PACKAGE) for name in names):
                found.add(path.name)
                assert node not in tree.body, f"{path.name} imports it whether it is used or not"
    assert found == {"engine_factory.py"}
