"""Bring what a step computed to the host: side by side in one buffer, one copy, one wait."""

from __future__ import annotations

import math
import time
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
        copied = torch.cuda.Event(enable_timing=True)
        copied.record()
        return PendingRead(self._fields, host, copied)


class PendingRead:
    """A read under way. Where everything will lie is known; the values are not.

    Attributes:
        copied: Of a GPU's stream, when everything has been copied; None: a CPU has.
    """

    def __init__(
        self, fields: dict[str, _Field], host: torch.Tensor, copied: torch.cuda.Event | None
    ) -> None:
        self._arrays = {name: _as_array(field.within(host)) for name, field in fields.items()}
        self.copied = copied

    @property
    def is_done(self) -> bool:
        """Return whether a device has said that `wait` would not wait; a CPU never says so."""
        return self.copied is not None and self.copied.query()

    def wait(self) -> dict[str, NDArray[Any]]:
        """Return every tensor by name; bfloat16, which numpy lacks, as bytes.

        They are views of the step's buffer: copy what outlives the step.
        """
        if self.copied is not None:
            self.copied.synchronize()
        return self._arrays


class ReadClock:
    """When what was read last had been copied, monotonic: on a GPU by its own clock.

    The host may hear of it much later, when it has other work.
    """

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._last: torch.cuda.Event | None = None

    def note(self, read: PendingRead) -> None:
        """Take note of a read that was waited for, in the order of the stream."""
        last, self._last = self._last, read.copied
        if last is None or read.copied is None:
            self._ended_s = time.monotonic()
        else:
            self._ended_s += last.elapsed_time(read.copied) / 1e3

    def ended_s(self) -> float:
        """Return when it had been, seconds."""
        return self._ended_s


def _as_array(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint8)
    array: NDArray[Any] = tensor.numpy()
    return array
