"""Bring what a step of a draft computed to the host; on a GPU by a copy to pinned memory."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.mailbox_words import MAX_PATH
from shared.messages import MAX_TREE_NODES

# Of a request: a tree as `select_nodes` packs it, and a path as `take_paths` has it.
_MOST_NUMBERS = 1 + 3 * (MAX_TREE_NODES - 1) + 1 + MAX_PATH


class StepResults:
    """What the device computed last.

    Args:
        max_batch: Requests, padding included.
    """

    def __init__(self, device: torch.device, max_batch: int) -> None:
        self._is_cpu = device.type == "cpu"
        self._on_host: list[NDArray[np.int32]] = []
        if not self._is_cpu:
            size = max_batch * _MOST_NUMBERS
            self._buffer = torch.empty(size, dtype=torch.int32, pin_memory=True)
            self._event = torch.cuda.Event()

    def start(self, *tensors: torch.Tensor) -> None:
        """Start to copy tensors, i32, to the host."""
        if self._is_cpu:
            self._on_host = [tensor.numpy() for tensor in tensors]
            return
        self._on_host, begin = [], 0
        for tensor in tensors:
            part = self._buffer[begin : begin + tensor.numel()].view(tensor.shape)
            part.copy_(tensor, non_blocking=True)
            self._on_host.append(part.numpy())
            begin += tensor.numel()
        self._event.record()

    def finish(self) -> list[NDArray[np.int32]]:
        """Return what was started last, valid until the next start; waits for the device."""
        if not self._is_cpu:
            self._event.synchronize()
        return self._on_host
