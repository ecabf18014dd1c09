"""Bring the host arrays of a step to the device in one copy, to the same addresses every time.

Captured graphs read their inputs where they lay at capture: arrays of the same sizes, placed in the
same order, get the same addresses, and the very same tensors, again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 256  # bytes
# Steps whose copy may still be under way when the next one is written.
_NUM_HOST_BUFFERS = 3
# Steps of prompts have many sizes; what is kept of them is no more than a convenience. It takes
# 20 KB per size, and saves a step on a CPU next to nothing.
_MAX_LAYOUTS = 1024
_MAX_CPU_LAYOUTS = 256

_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}

Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Arrays = dict[str, NDArray[Any]]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Named arrays side by side: on every host buffer, and on the device.

    Args:
        bytes_on_host: All of them, with what lies between.
        end: Byte after the last one.
    """

    on_host: list[Arrays]
    bytes_on_host: list[NDArray[np.uint8]]
    on_device: Tensors
    end: int


class Staging:
    """Memory through which the arrays of a step reach the device.

    Use: `begin`, then `place` (or `add`) everything and fill it, then `flush`; what reads the
    tensors is launched after it, on the same stream. They are valid until the next `begin`.

    Args:
        num_bytes: What one step may hold; a longer one goes round it.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device = device
        self._used = 0
        self._turn = 0
        self._layouts: dict[Hashable, _Layout] = {}
        self._spans: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # (to, from)
        self._updates: list[tuple[torch.Tensor, NDArray[Any], NDArray[Any]]] = []
        self._beside: list[tuple[torch.Tensor, torch.Tensor]] = []  # (to, from)
        self._is_cpu = device.type == "cpu"
        self._max_layouts = _MAX_CPU_LAYOUTS if self._is_cpu else _MAX_LAYOUTS
        self._on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        if self._is_cpu:
            self._on_host = [self._on_device]
            return
        self._on_host = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            for _ in range(_NUM_HOST_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() for _ in self._on_host]

    def begin(self) -> None:
        """Start a step. Waits only for a copy that is several steps old."""
        self._used = 0
        self._updates.clear()
        self._beside.clear()
        if not self._is_cpu:
            self._turn = (self._turn + 1) % len(self._on_host)
            self._copied[self._turn].synchronize()

    def place(self, **fields: tuple[torch.dtype, tuple[int, ...]]) -> tuple[Arrays, Tensors]:
        """Make room for arrays, each given as (dtype, shape).

        Returns: The arrays, whose values are left over from another step: fill all of them before
            the next `flush`; and the tensors that hold them after it. bfloat16, which numpy lacks,
            is filled in as int16.
        """
        key = (self._used, *fields.items())
        layout = self._layouts.get(key) or self._lay_out(key, fields)
        if layout is None:
            return self._place_beside(fields)
        self._used = layout.end
        return layout.on_host[self._turn], layout.on_device

    def place_zeros(self, fields_of: Callable[..., Fields], *sizes: int) -> tuple[Arrays, Tensors]:
        """Do what `place` does, sooner, for what a function says of sizes; the arrays are 0."""
        key = (self._used, fields_of, sizes)
        layout = self._layouts.get(key) or self._lay_out(key, fields_of(*sizes))
        if layout is None:
            arrays, tensors = self._place_beside(fields_of(*sizes))
            for array in arrays.values():
                array.fill(0)
            return arrays, tensors
        self._used = layout.end
        layout.bytes_on_host[self._turn].fill(0)
        return layout.on_host[self._turn], layout.on_device

    def add(self, array: NDArray[Any]) -> torch.Tensor:
        """Return the tensor that holds an array, i64, i32 or f32, after the next `flush`."""
        arrays, tensors = self.place(array=(_DTYPES[array.dtype], array.shape))
        arrays["array"][...] = array
        return tensors["array"]

    def update(
        self, table: torch.Tensor, index: NDArray[np.int64], values: NDArray[np.int32]
    ) -> None:
        """Let the next `flush` also set entries of a table.

        Args:
            table: Flat, i32, on the device.
            index: [n]; an entry may occur twice, with the same value.
            values: [n].
        """
        self._updates.append((table, index, values))

    def flush(self) -> None:
        """Start the copy of everything placed."""
        # Behind all else: their sizes differ from step to step.
        updates = []
        for table, index, values in self._updates:
            arrays, tensors = self.place_zeros(_update_fields, len(index))
            arrays["index"][:] = index
            arrays["values"][:] = values
            updates.append((table, tensors))
        if not self._is_cpu and self._used:
            to, source = self._span()
            to.copy_(source, non_blocking=True)
            self._copied[self._turn].record()
        for tensor, host in self._beside:
            tensor.copy_(host, non_blocking=True)
        for table, update in updates:
            table.index_copy_(0, update["index"], update["values"])

    def _span(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is in use, on the device and on the host."""
        key = (self._turn, self._used)
        span = self._spans.get(key)
        if span is None:
            if len(self._spans) >= _MAX_LAYOUTS:
                self._spans.clear()
            host = self._on_host[self._turn]
            span = self._spans[key] = (self._on_device[: self._used], host[: self._used])
        return span

    def _lay_out(self, key: Hashable, fields: Fields) -> _Layout | None:
        """Return, and keep, views of every buffer; None if the step does not fit."""
        on_host: list[Arrays] = [{} for _ in self._on_host]
        on_device: Tensors = {}
        end = self._used
        for name, (dtype, shape) in fields.items():
            begin, num_bytes = end, dtype.itemsize * math.prod(shape)
            end = -(-(begin + num_bytes) // ALIGNMENT) * ALIGNMENT
            if end > len(self._on_device):
                return None
            part = slice(begin, begin + num_bytes)
            on_device[name] = self._on_device[part].view(dtype).view(shape)
            for arrays, buffer in zip(on_host, self._on_host, strict=True):
                arrays[name] = _as_array(buffer[part].view(dtype).view(shape))
        if len(self._layouts) >= self._max_layouts:
            self._layouts.clear()
        layout = _Layout(
            on_host=on_host,
            bytes_on_host=[buffer[self._used : end].numpy() for buffer in self._on_host],
            on_device=on_device,
            end=end,
        )
        self._layouts[key] = layout
        return layout

    def _place_beside(self, fields: Fields) -> tuple[Arrays, Tensors]:
        """Do what `place` does in memory of its own."""
        arrays: Arrays = {}
        tensors: Tensors = {}
        for name, (dtype, shape) in fields.items():
            host = torch.empty(shape, dtype=dtype, pin_memory=not self._is_cpu)
            arrays[name], tensors[name] = _as_array(host), host
            if not self._is_cpu:
                tensors[name] = torch.empty(shape, dtype=dtype, device=self.device)
                self._beside.append((tensors[name], host))
        return arrays, tensors


def _update_fields(count: int) -> Fields:
    return {"index": (torch.int64, (count,)), "values": (torch.int32, (count,))}


def _as_array(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    array: NDArray[Any] = tensor.numpy()
    return array
