"""Every test of this folder runs three ways: plain CPU, TRITON_INTERPRET=1, compiled on a GPU.

Triton reads TRITON_INTERPRET when a kernel is decorated, so a pytest process is one of the three.
"""

from __future__ import annotations

import os

import pytest
import torch

from shared.kernels.dispatch import reset_launch_counts

# Compiles in a process that does not interpret, so its place is the plain run.
collect_ignore = ["test_compile.py"] if os.environ.get("TRITON_INTERPRET") == "1" else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what no reference can stand in for to the runs that have the kernels."""
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
        return
    without = [item for item in items if item.get_closest_marker("kernel_only")]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in set(without)]


@pytest.fixture
def device() -> torch.device:
    """Return where the operands live."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    torch.manual_seed(0)
    reset_launch_counts()
