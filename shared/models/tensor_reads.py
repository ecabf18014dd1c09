"""Read the tensors of a checkpoint's files to a device, and report how many bytes have been read.

Several threads read the bytes of a large tensor at once. On a CPU they read straight into the
tensor's memory, and convert piece by piece if the tensor becomes another dtype. For a GPU they read
into pinned memory, see read_ahead.py. Files are not mapped into memory: a file that is replaced or
cut off while it is read causes an error, not a SIGBUS.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import CheckpointError
from shared.models import pickled
from shared.models.read_ahead import ReadAhead, Stack
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
    """Report progress while the block of a `with` statement loads tensors.

    Args:
        report: Called with a text and the share that is loaded, 0..1.
        num_bytes: Bytes that will be read in all; 0 = not known, then the share stays 0.
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
        device: Where tensors go.
        num_threads: Threads that read; None: as many as there are cores, 8 at most.
        min_share_bytes: Least bytes per thread: handing over fewer would take longer than reading.
        stage_bytes: Size of a stage of pinned memory for a GPU; 0: bytes are read straight into
            the tensors.
        piece_values: Values that are converted at a time where the dtype changes: few enough for a
            core's cache, enough for few calls.
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
                self._fill_stacked,
                _report,
                stage_bytes=stage_bytes,
                min_share_bytes=min_share_bytes,
            )
        self._files: dict[Path, Any] = {}
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()  # of the descriptors

    def close(self) -> None:
        """Close all files, and end the threads."""
        # Threads may still read tensors that were announced and never asked for.
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.__exit__(None, None, None)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._staged = None
        self._files.clear()
        self._descriptors.clear()

    def read_ahead(self, stacks: Iterable[Sequence[TensorInfo]]) -> None:
        """Announce which tensors will be read next, in order, so that threads begin with them.

        A call replaces what was announced before. Reading in another order costs time, nothing
        else.

        Args:
            stacks: What each later call will read: one tensor, or those of a stack.
        """
        if self._staged is not None:
            stored = (infos for infos in stacks if not infos[0].is_pickled)
            self._staged.read_ahead(chain.from_iterable(map(_alike, stored)))

    def read(self, info: TensorInfo, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a tensor on the device.

        Args:
            dtype: What the tensor becomes; None: it keeps its dtype.
        Raises: CheckpointError naming a tensor that cannot be read.
        """
        return self.read_stack([info], dtype)[0]

    def read_stack(self, infos: Sequence[TensorInfo], dtype: torch.dtype | None) -> torch.Tensor:
        """Return tensors of one shape on the device, as one.

        Args:
            infos: n > 0 tensors; either all or none are pickled.
            dtype: What the tensors become; None: the dtype of the first.
        Returns: [n, *shape].
        Raises: CheckpointError naming a tensor that cannot be read.
        """
        if infos[0].is_pickled:
            opened = [self._opened(info, dtype) for info in infos]
            return opened[0][None] if len(opened) == 1 else torch.stack(opened)
        if dtype is None:
            dtype = _stored_dtype(infos[0])
        values = torch.empty((len(infos), *infos[0].shape), dtype=dtype, device=self._device)
        done = 0
        for stack in _alike(infos):
            stored = _stored_dtype(stack.infos[0])
            to = values[done : done + len(stack.infos)]
            if self._staged is not None:
                self._staged.read(stack, stored, to.view(-1))
            else:
                for info, one in zip(stack.infos, to, strict=True):
                    self._copy(info, stored, one)
            done += len(stack.infos)
        return values

    def _opened(self, info: TensorInfo, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a tensor that a library reads, not this module."""
        try:
            if info.file not in self._files:
                file = open_weights(info.file, str(self._device))
                self._files[info.file] = file.__enter__()
            tensor: torch.Tensor = self._files[info.file].get_tensor(info.name)
        except (SafetensorError, OSError) as error:
            raise _not_readable(info, error) from error
        _report(info.end - info.start)
        # On a CPU the tensor is a view of the mapped file, and invalid once the file is closed.
        is_view = self._device.type == "cpu"
        return tensor.to(device=self._device, dtype=dtype or tensor.dtype, copy=is_view)

    def _copy(self, info: TensorInfo, stored: torch.dtype, to: torch.Tensor) -> None:
        """Let threads read a tensor, each a share of it. Mutates: `to`."""
        values, size = to.view(-1), stored.itemsize
        most = self._piece_values

        def copy(begin: int, end: int) -> None:
            if to.dtype is stored:
                self._fill(_bytes_of(values[begin:end]), info, info.start + begin * size)
                return
            with torch.inference_mode(to.is_inference()):  # the mode is per thread
                piece = torch.empty(min(most, end - begin), dtype=stored)
                for first in range(begin, end, most):
                    part = values[first : min(first + most, end)]
                    self._fill(_bytes_of(piece[: len(part)]), info, info.start + first * size)
                    part.copy_(piece[: len(part)])

        self._share_out(copy, len(values), size)
        _report(info.end - info.start)

    def _share_out(self, copy: Callable[[int, int], None], num_values: int, size: int) -> None:
        """Call `copy(begin, end)` in threads, for shares of `num_values` values of `size` bytes."""
        count = min(self._num_threads, max(1, num_values * size // self._min_share_bytes))
        if count == 1:
            copy(0, num_values)
            return
        bounds = [num_values * i // count for i in range(count + 1)]
        for _ in self._pool.map(copy, bounds[:-1], bounds[1:]):
            pass

    def _fill_stacked(self, part: memoryview, stack: Stack, offset: int) -> None:
        """Read bytes of a stack, from an offset in the stack on. Mutates: `part`, all of it."""
        while part:
            index, begin = divmod(offset, stack.item_bytes)
            info = stack.infos[index]
            count = min(len(part), stack.item_bytes - begin)
            self._fill(part[:count], info, info.start + begin)
            part, offset = part[count:], offset + count

    def _fill(self, part: memoryview, info: TensorInfo, offset: int) -> None:
        """Read bytes of a file, from an offset in the file on. Mutates: `part`, all of it."""
        try:
            with self._lock:
                if info.file not in self._descriptors:
                    self._descriptors[info.file] = os.open(info.file, os.O_RDONLY)
                descriptor = self._descriptors[info.file]
            while part:
                num_read = os.preadv(descriptor, [part], offset)
                if not num_read:
                    raise CheckpointError(
                        f"{info.file} ended within {info.name!r}, while it was read"
                    )
                part, offset = part[num_read:], offset + num_read
        except OSError as error:
            raise _not_readable(info, error) from error


def _alike(infos: Sequence[TensorInfo]) -> Iterator[Stack]:
    """Yield tensors of one shape as stacks, a new one wherever the dtype changes."""
    for _, group in groupby(infos, lambda info: info.dtype):
        yield Stack(tuple(group))


def _not_readable(info: TensorInfo, error: Exception) -> CheckpointError:
    return CheckpointError(f"{info.file}: {info.name!r} is not readable: {error}")


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
