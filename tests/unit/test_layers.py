"""Imports point only down the list of layers, and importing a module does nothing else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coppice", "orchestrator", "draft_service", "target_service", "shared")

# Layer -> the layers it may import besides itself. coppice.v1 holds the generated stubs.
MAY_IMPORT = {
    "coppice": {"orchestrator", "draft_service", "target_service", "shared", "coppice.v1"},
    "orchestrator": {"shared", "coppice.v1"},
    "draft_service": {"shared", "shared.kernels", "coppice.v1"},
    "target_service": {"shared", "shared.kernels", "coppice.v1"},
    "shared": {"shared.kernels", "coppice.v1"},
    "shared.kernels": set(),
    "coppice.v1": set(),
}

# Modules of processes that never touch a tensor: command line, client, orchestrator, worker fronts.
TORCH_FREE = (
    "coppice",
    "coppice.cli.main",
    "coppice.client",
    "coppice.stack",
    "orchestrator.server",
    "orchestrator.vllm_engine",
    "coppice.gateway.server",
    "draft_service.server",
    "target_service.server",
)


def layer_of(module: str) -> str | None:
    for layer in ("coppice.v1", "shared.kernels"):
        if module == layer or module.startswith(layer + "."):
            return layer
    package = module.partition(".")[0]
    return package if package in PACKAGES else None


def source_files() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (path for path in sorted((ROOT / package).rglob("*.py")))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            # `from coppice import v1` names a module too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_point_down() -> None:
    wrong = []
    for path in source_files():
        layer = layer_of(module_name(path))
        assert layer is not None
        for imported in imports_of(path):
            other = layer_of(imported)
            if other is not None and other != layer and other not in MAY_IMPORT[layer]:
                wrong.append(f"{path.relative_to(ROOT)} imports {imported}")
    assert wrong == []


def test_the_layers_are_all_there() -> None:
    found = {layer_of(module_name(path)) for path in source_files()}
    assert found == set(MAY_IMPORT)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_no_tensor_library_where_none_is_needed(module: str) -> None:
    code = (
        f"import sys, json; import {module}; "
        "print(json.dumps([m for m in ('torch', 'transformers', 'triton') if m in sys.modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == []


# Run in a process of its own: imports every module, then says what changed.
SIDE_EFFECTS = """
import importlib, json, os, signal, sys, threading
modules = json.loads(sys.argv[1])
signals = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
environ, reads = dict(os.environ), []
plain_getitem = type(os.environ).__getitem__

def getitem(self, key):
    if key.startswith("COPPICE_"):
        reads.append(key)
    return plain_getitem(self, key)

type(os.environ).__getitem__ = getitem
sockets = []
sys.addaudithook(lambda event, args: sockets.append(event) if event in (
    "socket.bind", "socket.connect", "socket.getaddrinfo") else None)
for module in modules:
    importlib.import_module(module)
import torch
print(json.dumps({
    "threads": [t.name for t in threading.enumerate() if t is not threading.main_thread()],
    "signals": [int(n) for n, h in signals.items() if signal.getsignal(n) is not h],
    "environ": sorted(k for k in os.environ.keys() ^ environ.keys() if k.startswith("COPPICE")),
    "reads": reads,
    "sockets": sockets,
    "cuda": torch.cuda.is_initialized(),
}))
"""


def test_importing_everything_does_nothing() -> None:
    modules = [module_name(path) for path in source_files() if path.name not in ("__main__.py",)]
    result = subprocess.run(
        [sys.executable, "-c", SIDE_EFFECTS, json.dumps(modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "threads": [],
        "signals": [],
        "environ": [],
        "reads": [],
        "sockets": [],
        "cuda": False,
    }
