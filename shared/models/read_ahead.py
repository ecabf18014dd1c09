"""Bytes of files on their way to a GPU: threads put them into memory that it reads by itself.

Tensors that are announced are read while those before them are sent, and sent when they are asked
for. Large ones are read in parts, by all threads at once, and each part is sent when it is there.
Small ones that will lie beside each other are parts of one stack: their number costs next to
nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from shared.models.tensor_files import TensorInfo

_NUM_STAGES = 32
# Never filled ahead: what was not announced passes through them. While a GPU still reads what was
# sent last, threads fill others.
_NUM_KEPT = 8
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors of one dtype and shape that become one, in order."""

    infos: tuple[TensorInfo, ...]

    def __hash__(self) -> int:
        return hash(self.infos[0])  # tells nearly all apart; a layer's experts are hundreds

    @property
    def item_bytes(self) -> int:
        """Return the bytes of each tensor."""
        return self.infos[0].end - self.infos[0].start

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return len(self.infos) * self.item_bytes


class ReadAhead:
    """Reads stacks of tensors through stages, which are made as they are needed.

    Args:
        device: Where tensors go.
        pool: The threads that read.
        num_threads: Of the pool.
        fill: What a thread calls: fill memory with a stack's bytes, from an offset of them on.
        report: Is told how many bytes have been sent.
        stage_bytes: Of a stage.
        min_share_bytes: What one thread reads at least of a stack that fits into a stage or more.
    """

    def __init__(
        self,
        device: torch.device,
        pool: ThreadPoolExecutor,
        num_threads: int,
        fill: Callable[[memoryview, Stack, int], None],
        report: Callable[[int], None],
        *,
        stage_bytes: int,
        min_share_bytes: int,
    ) -> None:
        self._device = device
        self._pool = pool
        self._num_threads = num_threads
        self._fill = fill
        self._report = report
        assert stage_bytes % 8 == 0, "a value would lie in two parts"
        self._stage_bytes = stage_bytes
        self._min_share_bytes = min_share_bytes
        self._num_made = 0
        self._free: deque[_Stage] = deque()  # as they were sent, the oldest first
        self._announced: dict[Stack, None] = {}  # in order, not or not wholly begun
        self._begun: dict[Stack, deque[_Part]] = {}

    def read_ahead(self, stacks: Iterable[Stack]) -> None:
        """Announce which stacks are read next, in order, instead of those announced before."""
        for parts in self._begun.values():
            self._drop(parts)
        self._begun.clear()
        self._announced = dict.fromkeys(stack for stack in stacks if stack.num_bytes)
        self._go_ahead()

    def read(self, stack: Stack, stored: torch.dtype, to: torch.Tensor) -> None:
        """Send the values of a stack.

        Args:
            stored: Their dtype in the file.
        Raises: What `fill` raised.
        Mutates: `to`, [num_values] of any dtype, once the device comes to it.
        """
        self._announced.pop(stack, None)
        parts = self._begun.pop(stack, deque())
        part_bytes = self._part_bytes(stack)
        begins = range(0, stack.num_bytes, part_bytes)
        if len(begins) <= 1 and not parts:
            self._read_here(stack, stored, to)
            return
        num_begun = len(parts)
        try:
            for begin in begins:
                while num_begun < len(begins) and self._num_free:
                    parts.append(self._begin(stack, begins[num_begun], part_bytes))
                    num_begun += 1
                stage, filled = parts[0]
                end = min(begin + part_bytes, stack.num_bytes)
                filled.result()
                stage.send(stored, to[begin // stored.itemsize : end // stored.itemsize])
                self._report(end - begin)
                self._free.append(stage)
                parts.popleft()
                self._go_ahead()
        finally:
            self._drop(parts)

    def _read_here(self, stack: Stack, stored: torch.dtype, to: torch.Tensor) -> None:
        """Read what one thread reads anyway: that is sooner done than handed over."""
        stage = self._take()
        try:
            self._fill(stage.memory[: stack.num_bytes], stack, 0)
            stage.send(stored, to)
            self._report(stack.num_bytes)
        finally:
            self._free.append(stage)

    def _go_ahead(self) -> None:
        """Begin what is announced, in as many stages as there are for it."""
        while self._announced and self._num_free > _NUM_KEPT:
            stack = next(iter(self._announced))
            parts = self._begun.setdefault(stack, deque())
            part_bytes = self._part_bytes(stack)
            parts.append(self._begin(stack, len(parts) * part_bytes, part_bytes))
            if len(parts) * part_bytes >= stack.num_bytes:
                del self._announced[stack]

    def _begin(self, stack: Stack, begin: int, part_bytes: int) -> _Part:
        """Let a thread read the part of a stack that begins at a byte."""
        stage = self._take()
        memory = stage.memory[: min(part_bytes, stack.num_bytes - begin)]
        return stage, self._pool.submit(self._fill, memory, stack, begin)

    def _part_bytes(self, stack: Stack) -> int:
        """Return the bytes of a stack's parts, such that all threads are busy until its end."""
        size = stack.num_bytes
        least = -(-size // self._stage_bytes)
        most = -(-least // self._num_threads) * self._num_threads
        count = min(most, max(least, size // self._min_share_bytes))
        if count <= 1:
            return max(size, 1)
        return min(-(-size // count // _ALIGNMENT) * _ALIGNMENT, self._stage_bytes)

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

    def send(self, stored: torch.dtype, to: torch.Tensor) -> None:
        """Let the device read the first values, and convert them. Mutates: `to`."""
        values = self._values[: len(to) * stored.itemsize]
        if to.dtype is stored:
            to.view(torch.uint8).copy_(values, non_blocking=True)
        else:
            to.copy_(values.to(to.device, non_blocking=True).view(stored))
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
