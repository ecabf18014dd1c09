"""Read tensors from files to a GPU by way of pinned memory, ahead of their use.

A *stage* is a piece of pinned memory: a thread fills it from a file, and the GPU copies from it
asynchronously. Tensors that are announced (`ReadAhead.read_ahead`) are read into stages while
tensors before them are copied to the GPU. A large tensor is read in parts by all threads at once,
and each part is copied as soon as it was read. Small tensors that will lie beside each other on the
GPU are read as one stack, so that their number costs next to nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from shared.models.tensor_files import TensorInfo

_NUM_STAGES = 32
# Stages that are never filled ahead: tensors that were not announced pass through them. There are
# several, so that threads fill one while the GPU still copies from another.
_NUM_KEPT = 8
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors of one dtype and shape that become one, in order."""

    infos: tuple[TensorInfo, ...]

    def __hash__(self) -> int:
        return hash(self.infos[0])  # enough, and cheap: a stack of experts has hundreds of infos

    @property
    def item_bytes(self) -> int:
        """Return the bytes of each tensor."""
        return self.infos[0].end - self.infos[0].start

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return len(self.infos) * self.item_bytes


class ReadAhead:
    """Reads stacks of tensors through stages, which are allocated as they are needed.

    Args:
        device: Where tensors go.
        pool: The threads that read.
        num_threads: Threads of the pool.
        fill: Called in a thread: fills memory with a stack's bytes, from an offset in the stack on.
        report: Called with the number of bytes that have been sent.
        stage_bytes: Size of a stage.
        min_share_bytes: Least bytes of a stack that one thread reads, if several threads read it.
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
        self._free: deque[_Stage] = deque()  # in the order in which they were sent
        self._announced: dict[Stack, None] = {}  # in order; stacks whose last part is not begun
        self._begun: dict[Stack, deque[_Part]] = {}

    def read_ahead(self, stacks: Iterable[Stack]) -> None:
        """Announce which stacks are read next, in order. Replaces what was announced before."""
        for parts in self._begun.values():
            self._drop(parts)
        self._begun.clear()
        self._announced = dict.fromkeys(stack for stack in stacks if stack.num_bytes)
        self._go_ahead()

    def read(self, stack: Stack, stored: torch.dtype, to: torch.Tensor) -> None:
        """Copy the values of a stack to the device, asynchronously.

        Args:
            stored: The dtype of the values in the file.
        Raises: What `fill` raised.
        Mutates: `to`, [num_values] of any dtype, in the order of the device's stream.
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
        """Read a stack of one part in the calling thread: handing it over would take longer."""
        stage = self._take()
        try:
            self._fill(stage.memory[: stack.num_bytes], stack, 0)
            stage.send(stored, to)
            self._report(stack.num_bytes)
        finally:
            self._free.append(stage)

    def _go_ahead(self) -> None:
        """Begin to read announced stacks, in as many stages as are left for reading ahead."""
        while self._announced and self._num_free > _NUM_KEPT:
            stack = next(iter(self._announced))
            parts = self._begun.setdefault(stack, deque())
            part_bytes = self._part_bytes(stack)
            parts.append(self._begin(stack, len(parts) * part_bytes, part_bytes))
            if len(parts) * part_bytes >= stack.num_bytes:
                del self._announced[stack]

    def _begin(self, stack: Stack, begin: int, part_bytes: int) -> _Part:
        """Let a thread read the part of a stack that begins at byte `begin`."""
        stage = self._take()
        memory = stage.memory[: min(part_bytes, stack.num_bytes - begin)]
        return stage, self._pool.submit(self._fill, memory, stack, begin)

    def _part_bytes(self, stack: Stack) -> int:
        """Return the size of a stack's parts, chosen so that all threads are busy to the end."""
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
        """Return a stage that may be overwritten; a new one if none is free and one may be made."""
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
        """Take back the stages of parts that will not be sent."""
        for stage, filled in parts:
            if not filled.cancel():
                filled.exception()  # waits for its end
            self._free.append(stage)


class _Stage:
    """Pinned memory that a GPU copies from, in the stream that is current when the stage is made.
    For a CPU it is plain memory, copied from at once.

    Attributes:
        memory: The bytes of the stage.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        is_gpu = device.type == "cuda"
        self._values = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self._read = torch.cuda.Event() if is_gpu else None
        self._stream = torch.cuda.current_stream(device) if is_gpu else None
        self.memory = memoryview(self._values.numpy().data)

    def send(self, stored: torch.dtype, to: torch.Tensor) -> None:
        """Have the device copy and convert the first len(to) values. Mutates: `to`."""
        values = self._values[: len(to) * stored.itemsize]
        if to.dtype is stored:
            to.view(torch.uint8).copy_(values, non_blocking=True)
        else:
            to.copy_(values.to(to.device, non_blocking=True).view(stored))
        if self._read is not None:
            self._read.record(self._stream)

    def has_been_read(self) -> bool:
        """Return whether the device has finished the last copy from the stage."""
        return self._read is None or self._read.query()

    def wait(self) -> None:
        """Wait until the device has finished the last copy from the stage."""
        if self._read is not None:
            self._read.synchronize()


_Part = tuple[_Stage, "Future[None]"]
"""A stage, and a future that is done when a thread has filled the stage."""
