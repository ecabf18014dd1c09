"""Every test of this folder runs three ways: plain CPU, TRITON_INTERPRET=1, compiled on a GPU.

Triton reads TRITON_INTERPRET when a kernel is decorated, so a pytest process is one of the three.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from shared.kernels.dispatch import reset_launch_counts
from tests.marks import OLD_INTERPRETER

# One compiles in a process that does not interpret, the other has no kernel.
NOT_INTERPRETED = ["test_compile.py", "test_products_cpu.py"]
# Engines on a CPU have kernels if these are interpreted.
ONLY_INTERPRETED = ["test_engines.py"]
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = NOT_INTERPRETED if IS_INTERPRETED else ONLY_INTERPRETED


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


@pytest.fixture(autouse=True)
def _dots_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let interpreted kernels multiply in one order, as a tensor core does.

    The interpreter's tl.dot is numpy's BLAS, whose bits depend on a row's address and place. That
    a dot gives equal rows equal bits is a property of GPUs, which test_products.py checks there;
    what a kernel adds to it is what the tests of this folder are about.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot_in_order)


@pytest.fixture(autouse=True)
def _scalars_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton before 3.7 read scalars, which it keeps in arrays [1], with numpy from 2.4 on."""
    if os.environ.get("TRITON_INTERPRET") != "1" or not OLD_INTERPRETER:
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def _dot_in_order(
    builder: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any
) -> TensorHandle:
    """Return a b + d, each output adding its products in order of k, one operation at a time."""
    dtype = d.data.dtype
    left = np.moveaxis(a.data.astype(dtype), -1, 0)[..., None]  # [K, M, 1]
    right = np.moveaxis(b.data.astype(dtype), -2, 0)[..., None, :]  # [K, 1, N]
    out = left[0] * right[0]
    for k in range(1, len(left)):
        out += left[k] * right[k]
    return TensorHandle(out + d.data, d.dtype.scalar)
