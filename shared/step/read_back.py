"""Bring what a step computed to the host: side by side in one buffer, one copy, one wait."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

ALIGNMENT = 16  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """A tensor in the buffer, from byte `begin` on.

    Args:
        rows: [...] i64, which rows of the source; None: all of it.
    """

    source: torch.Tensor
    rows: torch.Tensor | None
    begin: int

    @property
    def shape(self) -> tuple[int, ...]:
        if self.rows is None:
            return tuple(self.source.shape)
        return (*self.rows.shape, *self.source.shape[1:])

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.source.element_size()

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the part of a buffer of bytes that holds this tensor."""
        part = buffer[self.begin : self.begin + self.num_bytes]
        return part.view(self.source.dtype).view(self.shape)


class ReadBack:
    """What one step reads.

    Use: `add` everything, `start`, and `wait` when it is wanted. Tensors may be overwritten, on the
    same stream, once `start` has returned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fields: dict[str, _Field] = {}
        self._num_bytes = 0

    def add(self, name: str, source: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Read a tensor, or the `rows` [...] i64 of it, as [..., *source.shape[1:]]."""
        assert name not in self._fields, f"{name} is read twice"
        field = _Field(source=source, rows=rows, begin=self._num_bytes)
        self._fields[name] = field
        self._num_bytes += -(-field.num_bytes // ALIGNMENT) * ALIGNMENT

    def start(self) -> PendingRead:
        """Gather everything and start the copy. Waits for nothing."""
        buffer = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        for field in self._fields.values():
            part = field.within(buffer)
            if field.rows is None:
                part.copy_(field.source)
            else:
                rows = field.rows.reshape(-1)
                flat = part.view(len(rows), *field.source.shape[1:])
                torch.index_select(field.source, 0, rows, out=flat)
        if self._device.type == "cpu":
            return PendingRead(self._fields, buffer, None)
        # PyTorch keeps pinned memory for the next step, and never hands it out while it is in use.
        host = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=True)
        host.copy_(buffer, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return PendingRead(self._fields, host, copied)


class PendingRead:
    """A read under way. Where everything will lie is known; the values are not."""

    def __init__(
        self, fields: dict[str, _Field], host: torch.Tensor, copied: torch.cuda.Event | None
    ) -> None:
        self._arrays = {name: _as_array(field.within(host)) for name, field in fields.items()}
        self._copied = copied

    @property
    def is_done(self) -> bool:
        """Return whether a device has said that `wait` would not wait; a CPU never says so."""
        return self._copied is not None and self._copied.query()

    def wait(self) -> dict[str, NDArray[Any]]:
        """Return every tensor by name; bfloat16, which numpy lacks, as bytes.

        They are views of the step's buffer: copy what outlives the step.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._arrays


def _as_array(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint8)
    array: NDArray[Any] = tensor.numpy()
    return array
