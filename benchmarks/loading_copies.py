"""Copies that bound how fast weights are loaded: files to pinned memory, and that to a device."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

_PART_BYTES = 8 << 20
_NUM_PARTS = 16
# How many parts are filled ahead; a device has as many more to read.
_AHEAD = _NUM_PARTS // 2


class Copies:
    """Copies all bytes of files, in parts.

    Args:
        device: Where they go; a CPU has no pinned memory, and other memory takes its place.
    """

    def __init__(self, files: Collection[Path], device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._places = [
            (file, offset)
            for file in files
            for offset in range(0, file.stat().st_size, _PART_BYTES)
        ]
        self._memory = [
            torch.zeros(_PART_BYTES, dtype=torch.uint8, pin_memory=is_gpu)
            for _ in range(_NUM_PARTS)
        ]
        self._events = [torch.cuda.Event() if is_gpu else None for _ in range(_NUM_PARTS)]
        self._to = torch.zeros(_PART_BYTES, dtype=torch.uint8, device=device)

    def to_memory(self, num_threads: int) -> None:
        """Copy the files to pinned memory, each thread to a part of its own."""

        def copy(thread: int) -> None:
            for index in range(thread, len(self._places), num_threads):
                self._fill(index, thread)

        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(copy, range(num_threads)))

    def to_device(self) -> None:
        """Copy as many bytes from pinned memory to the device; it may still do so afterwards."""
        for index in range(len(self._places)):
            self._send(index % _NUM_PARTS)

    def through_memory(self, num_threads: int) -> None:
        """Copy the files to the device, threads filling memory while it reads other."""
        filled: list[Future[None]] = []
        with ThreadPoolExecutor(num_threads) as pool:
            for index in range(len(self._places) + _AHEAD):
                if index >= _AHEAD:
                    filled[index - _AHEAD].result()
                    self._send((index - _AHEAD) % _NUM_PARTS)
                if index < len(self._places):
                    event = self._events[index % _NUM_PARTS]
                    if event is not None:
                        event.synchronize()
                    filled.append(pool.submit(self._fill, index, index % _NUM_PARTS))

    def _fill(self, index: int, part: int) -> None:
        file, offset = self._places[index]
        descriptor = os.open(file, os.O_RDONLY)
        os.preadv(descriptor, [self._memory[part].numpy().data], offset)
        os.close(descriptor)

    def _send(self, part: int) -> None:
        self._to.copy_(self._memory[part], non_blocking=True)
        event = self._events[part]
        if event is not None:
            event.record(torch.cuda.current_stream(self._to.device))
