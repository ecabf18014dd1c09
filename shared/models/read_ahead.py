"""Bytes of files on their way to a GPU: threads put them into memory that it reads by itself.

A tensor that is announced is read while those before it are sent, and sent when it is asked for.
A large one is read in parts, by all threads at once, and each part is sent when it is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from shared.models.tensor_files import TensorInfo

_NUM_STAGES = 32
# Never filled ahead: what was not announced passes through them. While a GPU still reads what was
# sent last, threads fill others.
_NUM_KEPT = 8
_ALIGNMENT = 4096


class ReadAhead:
    """Reads tensors through stages, which are made as they are needed.

    Args:
        device: Where tensors go.
        pool: The threads that read.
        num_threads: Of the pool.
        fill: What a thread calls: fill memory with a tensor's bytes, from an offset of its file on.
        stage_bytes: Of a stage.
        min_share_bytes: What one thread reads at least of a tensor that fits into a stage or more.
    """

    def __init__(
        self,
        device: torch.device,
        pool: ThreadPoolExecutor,
        num_threads: int,
        fill: Callable[[memoryview, TensorInfo, int], None],
        *,
        stage_bytes: int,
        min_share_bytes: int,
    ) -> None:
        self._device = device
        self._pool = pool
        self._num_threads = num_threads
        self._fill = fill
        self._stage_bytes = stage_bytes
        self._min_share_bytes = min_share_bytes
        self._num_made = 0
        self._free: deque[_Stage] = deque()  # as they were sent, the oldest first
        self._announced: dict[TensorInfo, None] = {}  # in order, not or not wholly begun
        self._begun: dict[TensorInfo, deque[_Part]] = {}

    def read_ahead(self, infos: Iterable[TensorInfo]) -> None:
        """Announce which tensors are read next, in order, instead of those announced before."""
        for parts in self._begun.values():
            self._drop(parts)
        self._begun.clear()
        self._announced = dict.fromkeys(info for info in infos if info.end > info.start)
        self._go_ahead()

    def read(self, info: TensorInfo, to: torch.Tensor) -> None:
        """Send the bytes of a tensor.

        Raises: What `fill` raised.
        Mutates: `to`, [num_bytes] u8, once the device comes to it.
        """
        self._announced.pop(info, None)
        parts = self._begun.pop(info, deque())
        bounds = self._bounds(info)
        if len(bounds) == 1 and not parts:
            self._read_here(info, to)
            return
        num_begun = len(parts)
        try:
            for begin, end in bounds:
                while num_begun < len(bounds) and self._num_free:
                    parts.append(self._begin(info, *bounds[num_begun]))
                    num_begun += 1
                stage, filled = parts[0]
                filled.result()
                stage.send(to[begin:end])
                self._free.append(stage)
                parts.popleft()
                self._go_ahead()
        finally:
            self._drop(parts)

    def _read_here(self, info: TensorInfo, to: torch.Tensor) -> None:
        """Read what one thread reads anyway: that is sooner done than handed over."""
        stage = self._take()
        try:
            self._fill(stage.memory[: len(to)], info, info.start)
            stage.send(to)
        finally:
            self._free.append(stage)

    def _go_ahead(self) -> None:
        """Begin what is announced, in as many stages as there are for it."""
        while self._announced and self._num_free > _NUM_KEPT:
            info = next(iter(self._announced))
            parts = self._begun.setdefault(info, deque())
            bounds = self._bounds(info)
            parts.append(self._begin(info, *bounds[len(parts)]))
            if len(parts) == len(bounds):
                del self._announced[info]

    def _begin(self, info: TensorInfo, begin: int, end: int) -> _Part:
        """Let a thread read the bytes [begin, end) of a tensor."""
        stage = self._take()
        memory = stage.memory[: end - begin]
        return stage, self._pool.submit(self._fill, memory, info, info.start + begin)

    def _bounds(self, info: TensorInfo) -> list[tuple[int, int]]:
        """Return the parts of a tensor, such that all threads are busy until its end."""
        size = info.end - info.start
        least = -(-size // self._stage_bytes)
        most = -(-least // self._num_threads) * self._num_threads
        count = min(most, max(least, size // self._min_share_bytes))
        if count <= 1:
            return [(0, size)]
        step = -(-size // count // _ALIGNMENT) * _ALIGNMENT
        step = min(step, self._stage_bytes)
        return [(begin, min(begin + step, size)) for begin in range(0, size, step)]

    @property
    def _num_free(self) -> int:
        return len(self._free) + _NUM_STAGES - self._num_made

    def _take(self) -> _Stage:
        """Return a stage that has been read: a new one if none has, and there may be more."""
        if self._free and self._free[0].has_been_read():
            return self._free.popleft()
        if self._num_made == _NUM_STAGES:
            stage = self._free.popleft()
            stage.wait()
            return stage
        stage = _Stage(self._device, self._stage_bytes)
        self._num_made += 1
        return stage

    def _drop(self, parts: Iterable[_Part]) -> None:
        """Take the stages of parts back that are not sent."""
        for stage, filled in parts:
            if not filled.cancel():
                filled.exception()  # waits for its end
            self._free.append(stage)


class _Stage:
    """Memory that a GPU reads by itself, in the stream of who makes it; a CPU copies at once.

    Attributes:
        memory: Its bytes.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        is_gpu = device.type == "cuda"
        self._values = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self._read = torch.cuda.Event() if is_gpu else None
        self._stream = torch.cuda.current_stream(device) if is_gpu else None
        self.memory = memoryview(self._values.numpy().data)

    def send(self, to: torch.Tensor) -> None:
        """Let the device read the first bytes. Mutates: `to`."""
        to.copy_(self._values[: len(to)], non_blocking=True)
        if self._read is not None:
            self._read.record(self._stream)

    def has_been_read(self) -> bool:
        """Return whether the device has read what was sent last."""
        return self._read is None or self._read.query()

    def wait(self) -> None:
        """Wait until the device has read what was sent last."""
        if self._read is not None:
            self._read.synchronize()


_Part = tuple[_Stage, "Future[None]"]
"""A stage, and when it is filled."""
