"""One thread of arithmetic in each process of tests, so that two of them share two cores.

Exactness is promised for a fixed number of threads, and one is the fastest for tiny models.
Services that a test starts choose their threads as they do for users.
"""

from __future__ import annotations

import os
from pathlib import Path

# numpy's BLAS, on which interpreted kernels run, reads it when numpy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

TESTS = Path(__file__).parent
# Tests of processes wait much, so they begin and others run meanwhile; then what computes most.
FOLDERS = ("e2e", "unit", "contract", "kernels")
# They start seconds after each other's, and every file that uses them shares them.
SHARED_STACKS = {"pair", "quartet"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests, and tell xdist which of them share what a process has made.

    A file stays in one process, for its models and plain runs; of e2e, all files that share
    stacks do, and all the others.
    """
    items.sort(key=lambda item: FOLDERS.index(_folder(item)))
    if not config.pluginmanager.hasplugin("xdist"):
        return
    with_shared = {
        item.path for item in items if SHARED_STACKS.intersection(getattr(item, "fixturenames", ()))
    }
    for item in items:
        group = item.path.stem
        if _folder(item) == "e2e":
            group = f"e2e-{'shared' if item.path in with_shared else 'own'}"
        item.add_marker(pytest.mark.xdist_group(group))


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]
