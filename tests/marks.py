"""Which of a test's parameters run when: see "Markers" in README.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import triton
from packaging.version import Version

EXHAUSTIVE = pytest.mark.exhaustive
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OLD_INTERPRETER = Version(triton.__version__) < Version("3.7") and Version(
    np.__version__
) >= Version("2.4")
"""Triton's interpreter fails with this numpy: `int` of an array [1] is an error."""


def exhaustive_if_interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Leave a test out of `make test` where it interprets kernels: it takes long there."""
    return EXHAUSTIVE(test) if IS_INTERPRETED else test


def first_if_interpreted(values: Iterable[Any]) -> list[Any]:
    """Return the parameters, all but the first exhaustive where kernels are interpreted."""
    first, *others = values
    return [first, *(exhaustive(others) if IS_INTERPRETED else others)]


def first_fast(values: Iterable[Any], *, num_fast: int = 1) -> list[Any]:
    """Return the parameters, all but the first left out of `make check`."""
    return [
        value if i < num_fast else _marked(value, pytest.mark.slow)
        for i, value in enumerate(values)
    ]


def exhaustive(values: Iterable[Any]) -> list[Any]:
    """Return the parameters, all of them left out of `make test`."""
    return [_marked(value, EXHAUSTIVE) for value in values]


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
