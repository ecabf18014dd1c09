"""Triton's interpreter without what it works out again and again, or for nothing: more than half of
its time.

Kernels compute the same; what is remembered are types and constants, which do not change.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_MOST_CONSTANTS = 10_000
_MOST_CONSTANT_BYTES = 1 << 14


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
    monkeypatch.setattr(tl.dtype, "__eq__", _equality())
    monkeypatch.setattr(tl.core, "_unwrap_if_constexpr", _unwrapping())
    monkeypatch.setattr(TritonSemantic, "binary_op_type_checking_impl", _operands())
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", _broadcast())


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


def _equality() -> Any:
    equal = tl.dtype.__eq__

    def eq(self: tl.dtype, other: object) -> bool:
        return self is other or equal(self, other)

    return eq


def _unwrapping() -> Any:
    unwrap = tl.core._unwrap_if_constexpr

    def quickly(value: Any) -> Any:
        kind = type(value)
        if kind is tl.constexpr:
            return value.value
        return value if kind in (tl.tensor, int) else unwrap(value)

    return quickly


def _operands() -> Any:
    """Return what makes operands alike: those that are so stay, and constants are made once."""
    make = TritonSemantic.binary_op_type_checking_impl
    known: dict[tuple[Any, ...], tl.tensor] = {}

    def operands(self: Any, lhs: Any, rhs: Any, *options: Any, **others: Any) -> Any:
        # Equal shapes are the same object, see `_tensors`; the dtype of a pointer is another class.
        if not isinstance(lhs, tl.tensor) or type(lhs.dtype) is not tl.dtype:
            return make(self, lhs, rhs, *options, **others)
        if isinstance(rhs, tl.tensor):
            is_alike = lhs.dtype is rhs.dtype and lhs.shape is rhs.shape
            if is_alike and not others.get("div_or_mod") and len(options) < 4:
                return lhs, rhs
            return make(self, lhs, rhs, *options, **others)
        key = (rhs, type(rhs), lhs.dtype.name, id(lhs.shape), options, *sorted(others.items()))
        constant = known.get(key)
        if constant is not None:
            return lhs, constant
        same, made = make(self, lhs, rhs, *options, **others)
        is_small = made.handle.data.nbytes <= _MOST_CONSTANT_BYTES
        if same is lhs and is_small and len(known) < _MOST_CONSTANTS:
            made.handle.data.flags.writeable = False
            known[key] = made
        return same, made

    return operands


def _broadcast() -> Any:
    """Return what makes shapes alike: those that are so stay, and a scalar's new type is known."""
    make = TritonSemantic.broadcast_impl_value
    known: dict[tuple[str, int], tl.block_type] = {}

    def splat(self: Any, value: tl.tensor, like: tl.tensor) -> tl.tensor:
        if type(value.dtype) is not tl.dtype:
            block = like.type.with_element_ty(value.dtype)
        else:
            key = (value.dtype.name, id(like.shape))
            block = known.get(key) or like.type.with_element_ty(value.dtype)
            known[key] = block
        return self.tensor(self.builder.create_splat(block, value.handle), block)

    def broadcast(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if lhs.type.is_block() == rhs.type.is_block():
            return make(self, lhs, rhs)
        if lhs.type.is_block():
            return lhs, splat(self, rhs, lhs)
        return splat(self, lhs, rhs), rhs

    return broadcast
