"""Bring the host arrays of a step to the device in one copy, to the same addresses every time.

Captured graphs read their inputs where they lay at capture: arrays of the same sizes, added in the
same order, get the same addresses again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 256  # bytes
# Steps whose copy may still be under way when the next one is written.
_NUM_HOST_BUFFERS = 3


class Staging:
    """Memory through which the arrays of a step reach the device.

    Use: `begin`, then `add` for every array, then `flush`; what reads the tensors is launched after
    it, on the same stream. The tensors are valid until the next `begin`.

    Args:
        num_bytes: What one step may hold; ignored on a CPU, where arrays stay where they are.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device = device
        self._used = 0
        self._turn = 0
        if device.type == "cpu":
            return
        self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._on_host = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            for _ in range(_NUM_HOST_BUFFERS)
        ]
        self._arrays = [tensor.numpy() for tensor in self._on_host]
        self._copied = [torch.cuda.Event() for _ in self._on_host]

    def begin(self) -> None:
        """Start a step. Waits only for a copy that is several steps old."""
        self._used = 0
        if self.device.type != "cpu":
            self._turn = (self._turn + 1) % len(self._on_host)
            self._copied[self._turn].synchronize()

    def add(self, array: NDArray[Any]) -> torch.Tensor:
        """Return the tensor that holds the array after the next `flush`."""
        array = np.ascontiguousarray(array)
        if self.device.type == "cpu":
            return torch.from_numpy(array)
        begin = self._used
        end = begin + array.nbytes
        if end > len(self._on_device):  # a step of unusual size; never one of a captured graph
            return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        self._arrays[self._turn][begin:end] = array.reshape(-1).view(np.uint8)
        dtype = torch.from_numpy(array).dtype
        return self._on_device[begin:end].view(dtype).view(array.shape)

    def flush(self) -> None:
        """Start the copy of everything added."""
        if self.device.type == "cpu" or not self._used:
            return
        used = min(self._used, len(self._on_device))
        host = self._on_host[self._turn]
        self._on_device[:used].copy_(host[:used], non_blocking=True)
        self._copied[self._turn].record()
