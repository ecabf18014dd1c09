"""One thread of arithmetic in each process of tests, so that two of them share two cores.

Exactness is promised for a fixed number of threads, and one is the fastest for tiny models.
Services that a test starts choose their threads as they do for users.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

# numpy's BLAS, on which interpreted kernels run, reads it when numpy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
# The same examples each time; how long one takes is up to what else the machine does.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")

# Tests of processes wait much, so they begin and others run meanwhile; then what computes most.
ORDER = ("e2e", "unit", "contract", "apart", "kernels")
# Of them, those whose stacks are their own and that mind least what else the machine does: any
# process that has time runs them, so that all end at about the same time.
APART = ("command_line", "compose", "exactness", "kubernetes", "pairings", "wheel")
# Of processes of tests that run beside those of stacks. A stack that recovers while its clients go
# on computes more, the longer that takes; who only computes can take what it leaves.
NICENESS = 5


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are imported: modules are none, and many to look through."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep modules and tests out of every garbage collection: none of them is garbage."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by folder."""
    here = Path(__file__).parent
    items.sort(key=lambda item: ORDER.index(_part_of(item.path.relative_to(here))))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave the cores to tests of stacks first, if another process runs those."""
    part = _part_of(item.path.relative_to(Path(__file__).parent))
    is_one_of_many = "PYTEST_XDIST_WORKER" in os.environ
    if is_one_of_many and part not in ("e2e", "apart") and os.nice(0) < NICENESS:
        os.nice(NICENESS - os.nice(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run all that shares what a process has made (`--dist=loadscope`).

    A file does, for its models and plain runs; so do most tests of processes, for their stacks:
    they wait much, and two of them at once would have each other wait.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.partition("::")[0])
            return "e2e" if _part_of(path.relative_to("tests")) == "e2e" else str(path)

    return Groups(config, log) if config.getoption("dist") == "loadscope" else None


def _part_of(path: Path) -> str:
    """Return the part of the tests that a file below this folder belongs to."""
    is_apart = path.parts[0] == "e2e" and path.stem.removeprefix("test_") in APART
    return "apart" if is_apart else path.parts[0]
