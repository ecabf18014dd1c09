"""Read the tensors of a checkpoint's files to a device, and say how many bytes have been read.

The bytes of a large tensor are copied by several threads at once: on a CPU straight into the memory
where it stays, one that becomes another dtype being converted piece by piece on its way; for a GPU
into memory that it reads by itself, see read_ahead.py. Files are not mapped: one that is replaced
or cut off meanwhile is an error, not the end of the process.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import CheckpointError
from shared.models import pickled
from shared.models.read_ahead import ReadAhead
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
        num_threads: That copy; None: as many as there are cores, 8 at most.
        min_share_bytes: What one thread copies at least: less is sooner done than handed over.
        stage_bytes: Of each part of memory that a GPU reads; 0: the bytes go straight to where
            they stay.
        piece_values: Read at once of what becomes another dtype: they stay in a core's cache, and
            calls are few.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        num_threads: int | None = None,
        min_share_bytes: int = 4 << 20,
        stage_bytes: int | None = None,
        piece_values: int = 1 << 17,
    ) -> None:
        self._device = device
        self._min_share_bytes = min_share_bytes
        self._piece_values = piece_values
        self._num_threads = num_threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="read-weights")
        self._staged: ReadAhead | None = None
        if stage_bytes is None:
            stage_bytes = 0 if device.type == "cpu" else 8 << 20
        if stage_bytes:
            self._staged = ReadAhead(
                device,
                self._pool,
                self._num_threads,
                self._fill,
                stage_bytes=stage_bytes,
                min_share_bytes=min_share_bytes,
            )
        self._files: dict[Path, Any] = {}
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()  # of the descriptors

    def close(self) -> None:
        """Close all files, and end the threads."""
        # Some may still read what nobody asked for.
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.__exit__(None, None, None)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._staged = None
        self._files.clear()
        self._descriptors.clear()

    def read_ahead(self, infos: Iterable[TensorInfo]) -> None:
        """Say which tensors will be asked for next, in order, so that threads begin with them.

        This replaces what was said before. An order that is not kept costs time, nothing else.
        """
        if self._staged is not None:
            self._staged.read_ahead(info for info in infos if not info.is_pickled)

    def read(
        self, info: TensorInfo, dtype: torch.dtype | None, to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a tensor on the device.

        Args:
            dtype: What it becomes; None: what it is.
            to: Memory for it, of its shape, dense and in `dtype`; None: memory of its own.
        Raises: CheckpointError naming a tensor that cannot be read.
        Mutates: `to`.
        """
        with _named_errors(info):
            if info.is_pickled:
                tensor = self._opened(info, dtype)
                to = tensor if to is None else to.copy_(tensor)
            else:
                stored = _stored_dtype(info)
                if to is None:
                    to = torch.empty(info.shape, dtype=dtype or stored, device=self._device)
                self._read_to(info, stored, to)
        _report(info.end - info.start)
        return to

    def read_alike(self, infos: Sequence[TensorInfo], dtype: torch.dtype) -> torch.Tensor:
        """Return small tensors on the device, which one copy takes there.

        Args:
            infos: Of one dtype and shape, all or none of them pickled.
            dtype: What they become.
        Returns: [n, *shape].
        Raises: CheckpointError naming a tensor that cannot be read.
        """
        first = infos[0]
        if first.is_pickled:
            return torch.stack([self.read(info, dtype) for info in infos])
        stored = _stored_dtype(first)
        is_gpu = self._device.type == "cuda"
        values = torch.empty((len(infos), *first.shape), dtype=stored, pin_memory=is_gpu)
        memory = _bytes_of(values.view(-1))
        size = first.end - first.start
        for i, info in enumerate(infos):
            with _named_errors(info):
                self._fill(memory[i * size : (i + 1) * size], info, info.start)
        _report(len(memory))
        return values.to(self._device, non_blocking=True).to(dtype)

    def _read_to(self, info: TensorInfo, stored: torch.dtype, to: torch.Tensor) -> None:
        """Read a tensor whose bytes are copied. Mutates: `to`."""
        if self._staged is None:
            self._copy(info, stored, to)
            return
        is_whole = to.dtype is stored
        tensor = to if is_whole else torch.empty(info.shape, dtype=stored, device=self._device)
        self._staged.read(info, tensor.view(-1).view(torch.uint8))
        if not is_whole:
            to.copy_(tensor)

    def _opened(self, info: TensorInfo, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a tensor that a library reads."""
        if info.file not in self._files:
            file = open_weights(info.file, str(self._device))
            self._files[info.file] = file.__enter__()
        tensor: torch.Tensor = self._files[info.file].get_tensor(info.name)
        # On a CPU it is a view of the mapped file, which ends with it.
        is_view = self._device.type == "cpu"
        return tensor.to(device=self._device, dtype=dtype or tensor.dtype, copy=is_view)

    def _copy(self, info: TensorInfo, stored: torch.dtype, to: torch.Tensor) -> None:
        """Let threads copy a tensor, each its share. Mutates: `to`."""
        values, size = to.view(-1), stored.itemsize
        most = self._piece_values

        def copy(begin: int, end: int) -> None:
            if to.dtype is stored:
                self._fill(_bytes_of(values[begin:end]), info, info.start + begin * size)
                return
            with torch.inference_mode(to.is_inference()):  # which is a thread's own
                piece = torch.empty(min(most, end - begin), dtype=stored)
                for first in range(begin, end, most):
                    part = values[first : min(first + most, end)]
                    self._fill(_bytes_of(piece[: len(part)]), info, info.start + first * size)
                    part.copy_(piece[: len(part)])

        self._share_out(copy, len(values), size)

    def _share_out(self, copy: Callable[[int, int], None], num_values: int, size: int) -> None:
        """Let threads copy values of so many bytes, each its share from one place to another."""
        count = min(self._num_threads, max(1, num_values * size // self._min_share_bytes))
        if count == 1:
            copy(0, num_values)
            return
        bounds = [num_values * i // count for i in range(count + 1)]
        for _ in self._pool.map(copy, bounds[:-1], bounds[1:]):
            pass

    def _fill(self, part: memoryview, info: TensorInfo, offset: int) -> None:
        """Copy bytes of a file from an offset on. Mutates: `part`, all of it."""
        with self._lock:
            if info.file not in self._descriptors:
                self._descriptors[info.file] = os.open(info.file, os.O_RDONLY)
            descriptor = self._descriptors[info.file]
        while part:
            num_read = os.preadv(descriptor, [part], offset)
            if not num_read:
                raise CheckpointError(f"{info.file} ended within {info.name!r}, while it was read")
            part, offset = part[num_read:], offset + num_read


@contextlib.contextmanager
def _named_errors(info: TensorInfo) -> Iterator[None]:
    """Let errors of a file say which tensor was read."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{info.file}: {info.name!r} is not readable: {error}") from error


def _report(num_bytes: int) -> None:
    """Tell `report_reads` of bytes that have been read."""
    on_read = _on_read.get()
    if on_read is not None:
        on_read(num_bytes)


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Return the memory of values on a CPU."""
    return memoryview(values.view(torch.uint8).numpy().data)


def _stored_dtype(info: TensorInfo) -> torch.dtype:
    """Return the dtype of a tensor in its file."""
    stored = _DTYPES.get(info.dtype)
    if stored is None:
        raise CheckpointError(f"{info.file}: {info.name!r} is {info.dtype}, which none reads")
    return stored
