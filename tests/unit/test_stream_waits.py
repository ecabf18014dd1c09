"""Waits of streams for words: what is asked of CUDA, and that none lasts for ever."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.kernels.mailbox_words import NO_NODE, mailbox_words_ref
from shared.peer import stream_waits
from shared.peer.stream_waits import NO_PATH, NO_TREE, StreamWaits

CPU = torch.device("cpu")
PATIENCE_S = 0.05
WAIT_VALUE_64, WRITE_VALUE_64 = 4, 5  # CU_STREAM_MEM_OP_..
TAGS = st.integers(2, 2**23 - 1)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Stream:
    """What CUDA would do with operations, as far as it is let.

    Attributes:
        parts: The operations [n] that it was given at once.
        is_behind: It does not come to any of them: steps before them take long.
    """

    def __init__(self, *, is_behind: bool = False) -> None:
        self.parts: list[NDArray[Any]] = []
        self.is_behind = is_behind
        self._num_done = 0

    def __call__(self, operations: NDArray[Any]) -> None:
        self.parts.append(operations.copy())
        self.go_on()

    @property
    def all(self) -> NDArray[Any]:
        return np.concatenate(self.parts)

    @property
    def waits(self) -> NDArray[Any]:
        return self.all[self.all["operation"] == WAIT_VALUE_64]

    def go_on(self) -> None:
        """Do what can be done with memory as it is."""
        while not self.is_behind and self._num_done < len(self.all):
            kind, address, value, flags, _ = self.all[self._num_done].tolist()
            memory = ctypes.c_int64.from_address(address)
            assert flags == 0
            if kind == WAIT_VALUE_64 and memory.value - value < 0:
                return
            if kind == WRITE_VALUE_64:
                memory.value = value
            self._num_done += 1


def word(tag: int, small: int = 3, token: int = 7) -> int:
    return int(mailbox_words_ref(*[torch.tensor(value) for value in (tag, small, token)]))


def is_over(wait: NDArray[Any], words: torch.Tensor) -> bool:
    """Return whether CUDA would end a wait (CU_STREAM_WAIT_VALUE_GEQ) with memory as it is."""
    index = (int(wait["address"]) - words.data_ptr()) // 8
    return int(words.flatten()[index]) - int(wait["value"]) >= 0


@given(wanted=TAGS, there=TAGS)
def test_a_wait_ends_with_its_round_or_a_later_one(wanted: int, there: int) -> None:
    words, stream = torch.zeros(4, 8, dtype=torch.int64), Stream()
    waits = StreamWaits(PATIENCE_S, small=NO_PATH, device=CPU, submit=stream, clock=Clock())
    waits.wait(words[:, 0], [2], [wanted])
    (wait,) = stream.waits
    assert not is_over(wait, words), "memory of zeros holds no word"
    words[1, 0] = words[2, 1] = word(wanted)
    assert not is_over(wait, words), "other slots and columns are none of its business"
    words[2, 0] = word(there)
    assert is_over(wait, words) == (there >= wanted)


def test_what_cuda_is_asked_for() -> None:
    words, stream = torch.zeros(300, 64, dtype=torch.int64), Stream(is_behind=True)
    waits = StreamWaits(PATIENCE_S, small=NO_TREE, device=CPU, submit=stream, clock=Clock())
    waits.wait(words[:, 1], range(300), range(2, 302))
    assert [len(part) for part in stream.parts] == [255, 47], "CUDA takes fewer than 256 at once"
    assert stream.parts[0].itemsize == 48, "CUstreamBatchMemOpParams"
    kinds = stream.all["operation"].tolist()
    assert kinds == [WRITE_VALUE_64] + 300 * [WAIT_VALUE_64] + [WRITE_VALUE_64]
    first, last = stream.waits[[0, -1]]
    assert int(first["address"]) == words[0, 1:].data_ptr()
    assert int(last["address"]) == words[299, 1:].data_ptr()
    assert int(last["value"]) == 301 << 40
    assert not stream.all["flags"].any(), "CU_STREAM_WAIT_VALUE_GEQ, ..WRITE_VALUE_DEFAULT"


def test_a_wait_that_cuda_refuses_says_so_beside_others() -> None:
    words, stream = torch.zeros(4, 8, dtype=torch.int64), Stream()
    waits = StreamWaits(PATIENCE_S, small=NO_TREE, device=CPU, submit=stream, clock=Clock())
    waits.wait(words[:, 0], [0, 1], [2, 2])

    def refuse(_: NDArray[Any]) -> None:
        raise OSError("CUDA lets no stream wait")

    waits._submit = refuse
    with pytest.raises(OSError, match="CUDA lets no stream wait"):
        waits.wait(words[:, 0], [2, 3], [2, 2])
    assert waits.end_overdue() == pytest.approx(PATIENCE_S), "the first one still lasts"


def test_what_the_stream_has_of_a_wait_that_cuda_refuses_is_ended() -> None:
    words, stream = torch.zeros(300, 8, dtype=torch.int64), Stream()
    waits = StreamWaits(PATIENCE_S, small=NO_TREE, device=CPU, submit=stream, clock=Clock())

    def refuse_more(operations: NDArray[Any]) -> None:
        if stream.parts:
            raise OSError("CUDA lets no stream wait")
        stream(operations)

    waits._submit = refuse_more
    with pytest.raises(OSError, match="CUDA lets no stream wait"):
        waits.wait(words[:, 0], range(300), [2] * 300)
    assert len(stream.waits) > 200 and all(is_over(wait, words) for wait in stream.waits)


@pytest.mark.parametrize("small", [NO_TREE, NO_PATH])
def test_what_lasts_too_long_is_ended_by_a_word_that_says_nothing(small: int) -> None:
    clock, words, stream = Clock(), torch.zeros(3, 8, dtype=torch.int64), Stream()
    waits = StreamWaits(PATIENCE_S, small=small, device=CPU, submit=stream, clock=clock)
    waits.wait(words[:, 0], [0, 1], [5, 9])
    words[1, 0] = came = word(9)
    clock.now += PATIENCE_S / 2
    waits.wait(words[:, 0], [2], [4])
    assert waits.end_overdue() == pytest.approx(PATIENCE_S / 2)
    assert words[0, 0] == 0, "not yet"
    clock.now += 0.6 * PATIENCE_S
    waits.end_overdue()
    assert [is_over(wait, words) for wait in stream.waits] == [True, True, False]
    assert words[1, 0] == came, "what came stays"
    assert int(words[0, 0]) == word(5, small, 0), "no node of any tree, or a path of length 0"
    stream.go_on()
    for _ in range(2):  # it sees that the first is over, and that the other has begun
        assert waits.end_overdue() is not None
        clock.now += PATIENCE_S
    assert waits.end_overdue() is not None, "it looks whether the stream goes on"
    assert all(is_over(wait, words) for wait in stream.waits)
    stream.go_on()
    clock.now += PATIENCE_S
    assert waits.end_overdue() is None


@pytest.mark.parametrize("late", [0, word(4)])
def test_a_wait_that_was_ended_is_ended_again_until_the_stream_goes_on(late: int) -> None:
    """A word of an earlier round, or the zeros of a new request, came in between."""
    clock, stream, words = Clock(), Stream(), torch.zeros(1, 8, dtype=torch.int64)
    waits = StreamWaits(PATIENCE_S, small=NO_TREE, device=CPU, submit=stream, clock=clock)
    waits.wait(words[:, 0], [0], [5])
    for _ in range(5):
        clock.now += 2 * PATIENCE_S
        assert waits.end_overdue() is not None
        assert is_over(stream.waits[0], words)
        words[0, 0] = late
    clock.now += 2 * PATIENCE_S
    assert waits.end_overdue() is not None
    stream.go_on()
    words[0, 0] = late
    clock.now += 2 * PATIENCE_S
    assert waits.end_overdue() is None
    assert int(words[0, 0]) == late, "nobody waits any more"


def test_a_wait_lasts_from_when_the_stream_is_there() -> None:
    clock, words = Clock(), torch.zeros(1, 8, dtype=torch.int64)
    stream = Stream(is_behind=True)
    waits = StreamWaits(PATIENCE_S, small=NO_TREE, device=CPU, submit=stream, clock=clock)
    waits.wait(words[:, 0], [0], [5])
    for _ in range(100):
        clock.now += PATIENCE_S
        waits.end_overdue()
    assert int(words[0, 0]) == 0, "steps before it take long"
    stream.is_behind = False
    stream.go_on()
    clock.now += PATIENCE_S
    waits.end_overdue()
    clock.now += 0.9 * PATIENCE_S
    waits.end_overdue()
    assert int(words[0, 0]) == 0, "the stream has just come"
    clock.now += 0.2 * PATIENCE_S
    waits.end_overdue()
    assert is_over(stream.waits[0], words)


def test_many_waits_one_after_the_other() -> None:
    clock, words, stream = Clock(), torch.zeros(1, 8, dtype=torch.int64), Stream()
    waits = StreamWaits(PATIENCE_S, small=NO_TREE, device=CPU, submit=stream, clock=clock)
    for tag in range(2, 1002):
        waits.wait(words[:, 0], [0], [tag])
        assert waits.end_overdue() is not None
        words[0, 0] = word(tag)
        stream.go_on()
        clock.now += PATIENCE_S
        assert waits.end_overdue() is None
        assert int(words[0, 0]) == word(tag)
        del stream.parts[:]
        stream = waits._submit = Stream()


def test_a_thread_ends_what_nobody_else_does() -> None:
    words, stream = torch.zeros(2, 8, dtype=torch.int64), Stream()
    waits = StreamWaits(0.01, small=NO_PATH, device=CPU, submit=stream)
    for tag in (3, 4):  # after a rest, too
        waits.wait(words[:, 0], [1], [tag])
        deadline = time.monotonic() + 60
        while not is_over(stream.waits[-1], words) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert is_over(stream.waits[-1], words)
        stream.go_on()
        time.sleep(0.02)


def test_one_wait_or_all_are_given_up() -> None:
    words, stream = torch.zeros(3, 8, dtype=torch.int64), Stream()
    waits = StreamWaits(60.0, small=NO_PATH, device=CPU, submit=stream)
    waits.wait(words[:, 0], [0, 1, 2], [5, 6, 7])
    waits.end(words[:, 0], 1, 6)
    assert [is_over(wait, words) for wait in stream.waits] == [False, True, False]
    waits.end(words[:, 0], 1, 5)
    assert int(words[1, 0]) == word(6, NO_PATH, 0), "a later word stays"
    waits.give_up()
    assert all(is_over(wait, words) for wait in stream.waits)


def test_what_cuda_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        @staticmethod
        def cuStreamBatchMemOp_v2(*_: Any) -> int:  # noqa: N802
            return 801

    class CudaStream:
        cuda_stream = 0

    monkeypatch.setattr(stream_waits, "_driver", Driver)
    monkeypatch.setattr(torch.cuda, "current_stream", CudaStream)
    waits = StreamWaits(60.0, small=NO_TREE, device=CPU)
    with pytest.raises(OSError, match="error 801"):
        waits.wait(torch.zeros(1, dtype=torch.int64), [0], [2])
    assert waits.end_overdue() is None, "nobody waits"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_stream_waits_until_a_word_comes() -> None:
    words = torch.zeros(2, 8, dtype=torch.int64, pin_memory=True)
    waits, done = StreamWaits(60.0, small=NO_TREE, device=torch.device("cuda")), torch.cuda.Event()
    waits.wait(words[:, 1], [1], [9])
    done.record()
    time.sleep(0.05)
    assert not done.query()
    words[1, 1] = word(9)
    done.synchronize()
    waits.wait(words[:, 1], [1], [10])
    done.record()
    waits.give_up()
    done.synchronize()
    assert NO_NODE == int(words[1, 1] >> 32) & 0xFF


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_wait_ends_while_another_thread_waits_for_the_stream() -> None:
    """As one does that loads a kernel, or frees memory."""
    words = torch.zeros(2, 8, dtype=torch.int64, pin_memory=True)
    waits = StreamWaits(0.05, small=NO_TREE, device=torch.device("cuda"))
    memory = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    waits.wait(words[:, 1], [1], [9])
    del memory
    torch.cuda.empty_cache()  # cudaFree
    waits.wait(words[:, 1], [1], [10])
    torch.special.bessel_j1(torch.ones(3, device="cuda")).tolist()  # a kernel that nobody used
    assert NO_NODE == int(words[1, 1] >> 32) & 0xFF
