"""Let a stream wait for words of a mailbox, where no kernel may: workers share a GPU.

A kernel that waits keeps its process's turn of the GPU, and who should post the word gets none. A
stream that waits by a memory operation gives its turn away. CUDA knows no end of such a wait, so
a thread ends those that last too long: it posts a word itself, which says that nothing comes. It
does so again until the stream has gone on: before the stream looks, a late word of an earlier round
may be written over that one, or a new request's over all. How far the stream is it writes to memory
itself, before and after the wait: so that thread calls nothing of CUDA, where a call of another
thread, which may wait for the stream as well, could hold it up.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEMOP.html
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.mailbox_words import NO_NODE, TAG_BITS

NO_TREE = NO_NODE
"""Small number of node 1 of a tree that does not come."""
NO_PATH = 0
"""Small number of a path that does not come: its length."""

_TAG_SHIFT = 40
assert TAG_BITS + _TAG_SHIFT == 63  # so that words are positive and count up
_SMALL_SHIFT = 32
_WAIT_VALUE_64 = 4  # CU_STREAM_MEM_OP_WAIT_VALUE_64
_WRITE_VALUE_64 = 5  # CU_STREAM_MEM_OP_WRITE_VALUE_64
_MOST_AT_ONCE = 255  # cuStreamBatchMemOp: "must be less than 256"
# CUstreamBatchMemOpParams with CUstreamMemOpWaitValueParams or ..WriteValueParams; 48 bytes. Flags
# of 0: CU_STREAM_WAIT_VALUE_GEQ, until int64(word - value) >= 0, or CU_STREAM_WRITE_VALUE_DEFAULT,
# after all that the stream has written before.
_OPERATION = np.dtype(
    {
        "names": ["operation", "address", "value", "flags", "alias"],
        "formats": [np.uint32, np.uint64, np.int64, np.uint32, np.uint64],
        "offsets": [0, 8, 16, 24, 32],
        "itemsize": 48,
    }
)

# Between two looks at a wait that the stream has not come to, or that was ended.
_AGAIN_S = 2e-3
# Far more waits than are under way at once: a stream has two or three.
_NUM_PLACES = 256
_BEGUN, _OVER = 0, 1


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    """A wait.

    Args:
        words: [S].
        number: Of the wait, from 1 on; the stream writes it when it comes to the wait, and when it
            goes on.
        until_s: When to look at it.
        was_early: The stream had not come to it when it was looked at.
    """

    words: NDArray[np.int64]
    slots: NDArray[np.int64]
    values: NDArray[np.int64]
    number: int
    until_s: float
    was_early: bool = False


class StreamWaits:
    """Waits of this process's streams, each for about `patience_s` at most once a stream is there.

    Words count up, so a wait for a word also ends with one of a later round; who reads them looks
    at their tags anyway.

    Args:
        small: The small number of a word which says that nothing comes.
        device: Of the streams.
        submit: Hands operations [n] of `_OPERATION` over to the device's current stream.
        clock: Monotonic, seconds.
    """

    def __init__(
        self,
        patience_s: float,
        *,
        small: int,
        device: torch.device,
        submit: Callable[[NDArray[Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience_s = patience_s
        self._nothing = np.int64(small) << _SMALL_SHIFT
        self._submit = submit_operations if submit is None else submit
        self._clock = clock
        progress = torch.zeros(_NUM_PLACES, 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._progress = progress.numpy()
        self._numbers = itertools.count(1)
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def wait(self, words: torch.Tensor, slots: Sequence[int], round_tags: Sequence[int]) -> None:
        """Let the current stream wait until words of these rounds, or later ones, are there.

        Args:
            words: [S] i64 in registered memory of the host, of any stride.
            slots: Of the words.
            round_tags: Of their rounds.
        """
        at, tags = np.array(slots, np.int64), np.array(round_tags, np.int64)
        waiting = _Waiting(
            words=words.numpy(),
            slots=at,
            values=tags << _TAG_SHIFT,
            number=next(self._numbers),
            until_s=self._clock() + self._patience_s,
        )
        operations = np.zeros(len(at) + 2, _OPERATION)
        waits = operations[1:-1]
        waits["operation"] = _WAIT_VALUE_64
        waits["address"] = words.data_ptr() + at * words.stride(0) * words.element_size()
        waits["value"] = waiting.values
        place = self._progress[waiting.number % _NUM_PLACES].ctypes.data
        for index, state in ((0, _BEGUN), (-1, _OVER)):
            address = place + state * self._progress.itemsize
            operations[index] = (_WRITE_VALUE_64, address, waiting.number, 0, 0)
        with self._changed:
            self._waiting.append(waiting)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="stream-waits", daemon=True)
            self._thread.start()
        begin = 0
        try:
            for begin in range(0, len(operations), _MOST_AT_ONCE):
                self._submit(operations[begin : begin + _MOST_AT_ONCE])
        except OSError:
            with self._changed:
                if begin:  # the stream has some of the waits already
                    _post(waiting.words, waiting.slots, waiting.values, self._nothing)
                else:
                    self._waiting.remove(waiting)
            raise

    def end(self, words: torch.Tensor, slot: int, round_tag: int) -> None:
        """End a wait for one word, if it still lasts."""
        values = np.array([round_tag], np.int64) << _TAG_SHIFT
        _post(words.numpy(), np.array([slot]), values, self._nothing)

    def give_up(self) -> None:
        """End all waits: what has not come comes too late."""
        with self._changed:
            for waiting in self._waiting[:]:
                self._end(waiting)

    def end_overdue(self) -> float | None:
        """End waits that last too long.

        Returns: How long until the next one is to be looked at, seconds; None: nothing waits.
        """
        with self._changed:
            now_s = self._clock()
            for waiting in self._waiting[:]:
                if waiting.until_s <= now_s:
                    self._look_at(waiting, now_s)
            if not self._waiting:
                return None
            return min(one.until_s for one in self._waiting) - now_s

    def _look_at(self, waiting: _Waiting, now_s: float) -> None:
        if not self._has_come(waiting, _BEGUN):
            waiting.until_s, waiting.was_early = now_s + _AGAIN_S, True
        elif waiting.was_early:
            waiting.until_s, waiting.was_early = now_s + self._patience_s, False
        else:
            self._end(waiting)

    def _end(self, waiting: _Waiting) -> None:
        """Forget a wait if it is over, else end it and look again soon."""
        if self._has_come(waiting, _OVER):
            self._waiting.remove(waiting)
            return
        _post(waiting.words, waiting.slots, waiting.values, self._nothing)
        waiting.until_s, waiting.was_early = self._clock() + _AGAIN_S, False
        self._changed.notify()

    def _has_come(self, waiting: _Waiting, state: int) -> bool:
        return bool(self._progress[waiting.number % _NUM_PLACES, state] >= waiting.number)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(timeout=self.end_overdue())


def _post(
    words: NDArray[np.int64],
    slots: NDArray[np.int64],
    values: NDArray[np.int64],
    nothing: np.int64,
) -> None:
    """Write words that say nothing for those that are missing."""
    missing = words[slots] - values < 0
    words[slots[missing]] = values[missing] | nothing


def submit_operations(operations: NDArray[Any]) -> None:
    """Give the current stream of the current device operations: [n] of `_OPERATION`, n < 256.

    Raises: OSError if CUDA cannot.
    """
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    result = _driver().cuStreamBatchMemOp_v2(
        stream, len(operations), ctypes.c_void_p(operations.ctypes.data), 0
    )
    if result != 0:
        raise OSError(f"CUDA lets no stream wait for memory: error {result}")


def check_stream_waits(words: torch.Tensor) -> None:
    """Raise OSError unless the current stream can wait for a word in registered memory."""
    waits = np.zeros(1, _OPERATION)
    waits["operation"], waits["address"] = _WAIT_VALUE_64, words.data_ptr()
    submit_operations(waits)  # for any word at all


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
