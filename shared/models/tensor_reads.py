"""Read the tensors of a checkpoint's files to a device, and say how many bytes have been read.

On a CPU the bytes of a large tensor are copied by several threads at once, straight into the memory
where it stays; one that becomes another dtype is converted piece by piece on its way. Files are not
mapped: one that is replaced or cut off meanwhile is an error, not the end of the process.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import CheckpointError
from shared.models import pickled
from shared.models.tensor_files import TensorInfo

REPORT_INTERVAL_S = 1.0
_MAX_THREADS = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_on_read: contextvars.ContextVar[Callable[[int], None] | None] = contextvars.ContextVar(
    "on_read", default=None
)


@contextlib.contextmanager
def report_reads(
    report: Callable[[str, float], None], *, num_bytes: int, interval_s: float = REPORT_INTERVAL_S
) -> Iterator[None]:
    """Say how far loading is, tensor by tensor, as long as the block takes.

    Args:
        report: Called with a text and the share that is loaded, 0..1.
        num_bytes: Of all that will be read; 0 = not known, then the share stays 0.
        interval_s: Least time between two reports, seconds.
    """
    num_read = 0
    next_report = time.monotonic() + interval_s
    whole = f" of {num_bytes / 1e9:.1f}" if num_bytes else ""

    def on_read(size: int) -> None:
        nonlocal num_read, next_report
        num_read += size
        now = time.monotonic()
        if now >= next_report:
            next_report = now + interval_s
            share = min(1.0, num_read / num_bytes) if num_bytes else 0.0
            report(f"loading weights, {num_read / 1e9:.1f}{whole} GB", share)

    token = _on_read.set(on_read)
    try:
        yield
    finally:
        _on_read.reset(token)


def open_weights(path: Path, device: str = "cpu") -> Any:
    """Open a file of weights; a context manager with `get_tensor`.

    Raises: CheckpointError or SafetensorError if it cannot be read.
    """
    if path.suffix == pickled.SUFFIX:
        return pickled.PickledFile(path)
    return safe_open(path, framework="pt", device=device)


class TensorReads:
    """Reads tensors to one device.

    Args:
        num_threads: That copy on a CPU; None: as many as there are cores, 8 at most.
        min_share_bytes: What one thread copies at least: less is sooner done than handed over.
        piece_values: Read at once of what becomes another dtype: they stay in a core's cache, and
            calls are few.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        num_threads: int | None = None,
        min_share_bytes: int = 4 << 20,
        piece_values: int = 1 << 17,
    ) -> None:
        self._device = device
        self._min_share_bytes = min_share_bytes
        self._piece_values = piece_values
        self._num_threads = num_threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._files: dict[Path, Any] = {}
        self._descriptors: dict[Path, int] = {}
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Close all files, and end the threads."""
        for file in self._files.values():
            file.__exit__(None, None, None)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._files.clear()
        self._descriptors.clear()

    def read(self, info: TensorInfo, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a tensor on the device, in memory of its own.

        Args:
            dtype: What it becomes; None: what it is.
        Raises: CheckpointError naming a tensor that cannot be read.
        """
        try:
            is_copied = self._device.type == "cpu" and not info.is_pickled
            tensor = self._copied(info, dtype) if is_copied else self._opened(info, dtype)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: {info.name!r} is not readable: {error}") from error
        on_read = _on_read.get()
        if on_read is not None:
            on_read(info.end - info.start)
        return tensor

    def _opened(self, info: TensorInfo, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a tensor that a library reads."""
        if info.file not in self._files:
            file = open_weights(info.file, str(self._device))
            self._files[info.file] = file.__enter__()
        tensor: torch.Tensor = self._files[info.file].get_tensor(info.name)
        # On a CPU it is a view of the mapped file, which ends with it.
        is_view = self._device.type == "cpu"
        return tensor.to(device=self._device, dtype=dtype or tensor.dtype, copy=is_view)

    def _copied(self, info: TensorInfo, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a tensor whose bytes are copied."""
        stored = _DTYPES.get(info.dtype)
        if stored is None:
            raise CheckpointError(f"{info.file}: {info.name!r} is {info.dtype}, which none reads")
        if info.file not in self._descriptors:
            self._descriptors[info.file] = os.open(info.file, os.O_RDONLY)
        tensor = torch.empty(info.shape, dtype=dtype or stored)
        values, size = tensor.view(-1), stored.itemsize
        count = min(self._num_threads, max(1, len(values) * size // self._min_share_bytes))
        bounds = [len(values) * i // count for i in range(count + 1)]
        most = self._piece_values

        def copy(share: int) -> None:
            begin, end = bounds[share], bounds[share + 1]
            if tensor.dtype is stored:
                self._fill(values[begin:end], info, info.start + begin * size)
                return
            with torch.inference_mode(tensor.is_inference()):  # which is a thread's own
                piece = torch.empty(min(most, end - begin), dtype=stored)
                for first in range(begin, end, most):
                    part = values[first : min(first + most, end)]
                    self._fill(piece[: len(part)], info, info.start + first * size)
                    part.copy_(piece[: len(part)])

        if count == 1:
            copy(0)
            return tensor
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="read-weights")
        for _ in self._pool.map(copy, range(count)):
            pass
        return tensor

    def _fill(self, values: torch.Tensor, info: TensorInfo, offset: int) -> None:
        """Copy bytes of a file from an offset on. Mutates: `values`, all of them."""
        descriptor = self._descriptors[info.file]
        part = memoryview(values.view(torch.uint8).numpy().data)
        while part:
            num_read = os.preadv(descriptor, [part], offset)
            if not num_read:
                raise CheckpointError(f"{info.file} ended within {info.name!r}, while it was read")
            part, offset = part[num_read:], offset + num_read
