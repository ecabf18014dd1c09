"""Every test of this folder runs three ways: plain CPU, TRITON_INTERPRET=1, compiled on a GPU.

Triton reads TRITON_INTERPRET when a kernel is decorated, so a pytest process is one of the three.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from shared.kernels.dispatch import reset_launch_counts
from tests.kernels.quick_interpreter import speed_up
from tests.marks import OLD_INTERPRETER

# One compiles in a process that does not interpret, the other has no kernel.
NOT_INTERPRETED = ["test_compile.py", "test_products_cpu.py"]
# Engines on a CPU have kernels if these are interpreted.
ONLY_INTERPRETED = ["test_engines.py"]
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = NOT_INTERPRETED if IS_INTERPRETED else ONLY_INTERPRETED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what no reference can stand in for to the runs that have the kernels."""
    if IS_INTERPRETED or torch.cuda.is_available():
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
    if IS_INTERPRETED:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot_in_order)


@pytest.fixture(scope="session", autouse=True)
def _language_is_interpreted() -> Iterator[None]:
    """Patch Triton's language once, for all launches and all functions that kernels call.

    The interpreter does it for each of them, which takes half of its time; of the rest half goes
    the way of `quick_interpreter.py`.
    """
    if not IS_INTERPRETED:
        yield
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        if OLD_INTERPRETER:
            monkeypatch.setattr(interpreter, "_patch_lang_tensor", _with_scalars_that_are_read())
        speed_up(monkeypatch)
        kernel = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        scope = interpreter._patch_lang(kernel)
        nothing = interpreter._LangPatchScope()
        monkeypatch.setattr(interpreter, "_patch_lang", lambda _: nothing)
        yield
        scope.restore()


def _with_scalars_that_are_read() -> Callable[[Any, Any], None]:
    """Return what patches tensors of Triton before 3.7, whose scalars are arrays [1].

    numpy from 2.4 on does not read these by `int`.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patch


def _dot_in_order(
    builder: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any
) -> TensorHandle:
    """Return a b + d, each output adding its products in order of k, one operation at a time.

    So does einsum, unless it may optimize: columns of the contiguous right are its inner loop.
    """
    dtype = d.data.dtype
    left, right = (np.ascontiguousarray(side.data, dtype) for side in (a, b))
    out = np.einsum("...mk,...kn->...mn", left, right, optimize=False)
    return TensorHandle(out + d.data, d.dtype.scalar)
