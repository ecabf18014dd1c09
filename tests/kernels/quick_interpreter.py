"""Triton's interpreter without what it works out again and again, or for nothing: half of its time.

Kernels compute the same; what is remembered are types, which do not change.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def speed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let types be made once, and overflows be looked for only where somebody hears of them.

    Without `debug`, an interpreter computes every sum and product of integers once more in 64 bits,
    compares it with the limits, and drops what came out.
    """
    builder = interpreter.interpreter_builder
    options = builder.options
    options = dataclasses.replace(options, sanitize_overflow=options.debug)
    monkeypatch.setattr(builder, "options", options)
    monkeypatch.setattr(interpreter, "_get_np_dtype", _numpy_dtypes())
    monkeypatch.setattr(tl.block_type, "__init__", _block_types())
    monkeypatch.setattr(tl.tensor, "__init__", _tensors())


def _numpy_dtypes() -> Any:
    make = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def numpy_dtype(dtype: tl.dtype) -> np.dtype[Any]:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = make(dtype)
        return found

    return numpy_dtype


def _block_types() -> Any:
    make = tl.block_type.__init__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        if type(element_ty) is not tl.dtype:  # pointers differ in more than their names
            make(self, element_ty, shape)
            return
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        fields = known.get(key)
        if fields is None:
            make(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        else:
            self.__dict__.update(fields)

    return init


def _tensors() -> Any:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: tl.tensor, handle: Any, type: tl.dtype) -> None:  # noqa: A002
        shape = tuple(type.shape) if type.is_block() else ()
        found = known.get(shape)
        if found is None:
            sizes = tl.core.tuple([tl.constexpr(size) for size in shape])
            found = known[shape] = (sizes, tl.constexpr(math.prod(shape)))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found

    return init
