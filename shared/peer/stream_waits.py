"""Let a stream wait for words of a mailbox, where no kernel may: target and draft have one GPU.

A kernel that waits keeps its process's turn of the GPU, and who should post the word gets none. A
stream that waits by a memory operation gives its turn away. CUDA knows no end of such a wait, so
a thread ends those that last too long: it posts a word itself, which says that nothing comes.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEMOP.html
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections import deque
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
_MOST_AT_ONCE = 256
# CUstreamBatchMemOpParams with a CUstreamMemOpWaitValueParams; 48 bytes. Flags of 0 are
# CU_STREAM_WAIT_VALUE_GEQ: until int64(word - value) >= 0.
_WAIT = np.dtype(
    {
        "names": ["operation", "address", "value", "flags", "alias"],
        "formats": [np.uint32, np.uint64, np.int64, np.uint32, np.uint64],
        "offsets": [0, 8, 16, 24, 32],
        "itemsize": 48,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    words: NDArray[np.int64]  # [S]
    slots: NDArray[np.int64]
    values: NDArray[np.int64]
    until_s: float


class StreamWaits:
    """Waits of this process's streams, each for as long as `patience_s` at most.

    Words count up, so a wait for a word also ends with one of a later round; who reads them looks
    at their tags anyway.

    Args:
        small: The small number of a word which says that nothing comes.
        submit: Hands waits [n] of `_WAIT` over to the device's current stream.
        clock: Monotonic, seconds.
    """

    def __init__(
        self,
        patience_s: float,
        *,
        small: int,
        submit: Callable[[NDArray[Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience_s = patience_s
        self._nothing = np.int64(small) << _SMALL_SHIFT
        self._submit = submit_waits if submit is None else submit
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
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
        waits = np.zeros(len(at), _WAIT)
        waits["operation"] = _WAIT_VALUE_64
        waits["address"] = words.data_ptr() + at * words.stride(0) * words.element_size()
        waits["value"] = tags << _TAG_SHIFT
        with self._changed:
            self._waiting.append(
                _Waiting(
                    words=words.numpy(),
                    slots=at,
                    values=waits["value"],
                    until_s=self._clock() + self._patience_s,
                )
            )
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="stream-waits", daemon=True)
            self._thread.start()
        for begin in range(0, len(waits), _MOST_AT_ONCE):
            self._submit(waits[begin : begin + _MOST_AT_ONCE])

    def end(self, words: torch.Tensor, slot: int, round_tag: int) -> None:
        """End a wait for one word, if it still lasts."""
        self._end(words.numpy(), np.array([slot]), np.array([round_tag], np.int64) << _TAG_SHIFT)

    def give_up(self) -> None:
        """End all waits: what has not come comes too late."""
        with self._changed:
            while self._waiting:
                self._end_all(self._waiting.popleft())

    def end_overdue(self) -> float | None:
        """End waits that last too long.

        Returns: How long the next one may last, seconds; None: nothing waits.
        """
        with self._changed:
            while self._waiting:
                left_s = self._waiting[0].until_s - self._clock()
                if left_s > 0:
                    return left_s
                self._end_all(self._waiting.popleft())
        return None

    def _end_all(self, waiting: _Waiting) -> None:
        self._end(waiting.words, waiting.slots, waiting.values)

    def _end(
        self, words: NDArray[np.int64], slots: NDArray[np.int64], values: NDArray[np.int64]
    ) -> None:
        missing = words[slots] - values < 0
        words[slots[missing]] = values[missing] | self._nothing

    def _watch(self) -> None:
        while True:
            left_s = self.end_overdue()
            with self._changed:
                if left_s is not None:
                    self._changed.wait_for(lambda: not self._waiting, timeout=left_s)
                else:
                    self._changed.wait_for(lambda: bool(self._waiting))


def submit_waits(waits: NDArray[Any]) -> None:
    """Let the current stream of the current device wait: `waits` is [n] of `_WAIT`, n <= 256.

    Raises: OSError if CUDA cannot.
    """
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    result = _driver().cuStreamBatchMemOp_v2(
        stream, len(waits), ctypes.c_void_p(waits.ctypes.data), 0
    )
    if result != 0:
        raise OSError(f"CUDA lets no stream wait for memory: error {result}")


def check_stream_waits(words: torch.Tensor) -> None:
    """Raise OSError unless the current stream can wait for a word in registered memory."""
    waits = np.zeros(1, _WAIT)
    waits["operation"], waits["address"] = _WAIT_VALUE_64, words.data_ptr()
    submit_waits(waits)  # for any word at all


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
