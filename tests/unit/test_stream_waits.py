"""Waits of streams for words: what is asked of CUDA, and that none lasts for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
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

PATIENCE_S = 0.05
TAGS = st.integers(2, 2**23 - 1)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Submitted(list[NDArray[Any]]):
    def __call__(self, waits: NDArray[Any]) -> None:
        self.append(waits.copy())

    @property
    def all(self) -> NDArray[Any]:
        return np.concatenate(self)


class Stream:
    """Says how far it is.

    Attributes:
        num_done: Marks that it has come to.
    """

    def __init__(self, num_done: int = 0) -> None:
        self.num_done, self.num_marks = num_done, 0

    def mark(self) -> Callable[[], bool]:
        self.num_marks += 1
        place = self.num_marks
        return lambda: place <= self.num_done


def here() -> Stream:
    """Return a stream that has come to its first wait."""
    return Stream(num_done=1)


def word(tag: int, small: int = 3, token: int = 7) -> int:
    return int(mailbox_words_ref(*[torch.tensor(value) for value in (tag, small, token)]))


def is_over(wait: NDArray[Any], words: torch.Tensor) -> bool:
    """Return whether CUDA would end a wait (CU_STREAM_WAIT_VALUE_GEQ) with memory as it is."""
    index = (int(wait["address"]) - words.data_ptr()) // 8
    return int(words.flatten()[index]) - int(wait["value"]) >= 0


@given(wanted=TAGS, there=TAGS)
def test_a_wait_ends_with_its_round_or_a_later_one(wanted: int, there: int) -> None:
    words, submitted = torch.zeros(4, 8, dtype=torch.int64), Submitted()
    waits = StreamWaits(
        PATIENCE_S, small=NO_PATH, submit=submitted, mark=here().mark, clock=Clock()
    )
    waits.wait(words[:, 0], [2], [wanted])
    (wait,) = submitted.all
    assert not is_over(wait, words), "memory of zeros holds no word"
    words[1, 0] = words[2, 1] = word(wanted)
    assert not is_over(wait, words), "other slots and columns are none of its business"
    words[2, 0] = word(there)
    assert is_over(wait, words) == (there >= wanted)


def test_what_cuda_is_asked_for() -> None:
    words, submitted = torch.zeros(300, 64, dtype=torch.int64), Submitted()
    waits = StreamWaits(
        PATIENCE_S, small=NO_TREE, submit=submitted, mark=here().mark, clock=Clock()
    )
    waits.wait(words[:, 1], range(300), range(2, 302))
    assert [len(part) for part in submitted] == [256, 44], "CUDA takes 256 at once"
    assert submitted[0].itemsize == 48, "CUstreamBatchMemOpParams"
    assert set(submitted.all["operation"].tolist()) == {4}, "CU_STREAM_MEM_OP_WAIT_VALUE_64"
    first, last = submitted.all[0], submitted.all[-1]
    assert int(first["address"]) == words[0, 1:].data_ptr()
    assert int(last["address"]) == words[299, 1:].data_ptr()
    assert int(last["value"]) == 301 << 40
    assert not submitted.all["flags"].any(), "CU_STREAM_WAIT_VALUE_GEQ"


@pytest.mark.parametrize("small", [NO_TREE, NO_PATH])
def test_what_lasts_too_long_is_ended_by_a_word_that_says_nothing(small: int) -> None:
    clock, words, submitted = Clock(), torch.zeros(3, 8, dtype=torch.int64), Submitted()
    stream = Stream(num_done=1)
    waits = StreamWaits(PATIENCE_S, small=small, submit=submitted, mark=stream.mark, clock=clock)
    waits.wait(words[:, 0], [0, 1], [5, 9])
    words[1, 0] = came = word(9)
    clock.now += PATIENCE_S / 2
    waits.wait(words[:, 0], [2], [4])
    assert waits.end_overdue() == pytest.approx(PATIENCE_S / 2)
    assert words[0, 0] == 0, "not yet"
    clock.now += 0.6 * PATIENCE_S
    waits.end_overdue()
    assert [is_over(wait, words) for wait in submitted.all] == [True, True, False]
    assert words[1, 0] == came, "what came stays"
    assert int(words[0, 0]) == word(5, small, 0), "no node of any tree, or a path of length 0"
    stream.num_done = 3
    clock.now += PATIENCE_S
    assert waits.end_overdue() is not None, "it looks whether the stream goes on"
    assert all(is_over(wait, words) for wait in submitted.all)
    stream.num_done = 4
    clock.now += PATIENCE_S
    assert waits.end_overdue() is None


@pytest.mark.parametrize("late", [0, word(4)])
def test_a_wait_that_was_ended_is_ended_again_until_the_stream_goes_on(late: int) -> None:
    """A word of an earlier round, or the zeros of a new request, came in between."""
    clock, stream, words = Clock(), here(), torch.zeros(1, 8, dtype=torch.int64)
    submitted = Submitted()
    waits = StreamWaits(PATIENCE_S, small=NO_TREE, submit=submitted, mark=stream.mark, clock=clock)
    waits.wait(words[:, 0], [0], [5])
    for _ in range(5):
        clock.now += 2 * PATIENCE_S
        assert waits.end_overdue() is not None
        assert is_over(submitted.all[0], words)
        words[0, 0] = late
    stream.num_done = 2
    clock.now += 2 * PATIENCE_S
    assert waits.end_overdue() is None
    assert int(words[0, 0]) == late, "nobody waits any more"


def test_a_wait_lasts_from_when_the_stream_is_there() -> None:
    clock, stream, words = Clock(), Stream(), torch.zeros(1, 8, dtype=torch.int64)
    submitted = Submitted()
    waits = StreamWaits(PATIENCE_S, small=NO_TREE, submit=submitted, mark=stream.mark, clock=clock)
    waits.wait(words[:, 0], [0], [5])
    for _ in range(100):
        clock.now += PATIENCE_S
        waits.end_overdue()
    assert int(words[0, 0]) == 0, "steps before it take long"
    stream.num_done = 1
    clock.now += PATIENCE_S
    waits.end_overdue()
    clock.now += 0.9 * PATIENCE_S
    waits.end_overdue()
    assert int(words[0, 0]) == 0, "the stream has just come"
    clock.now += 0.2 * PATIENCE_S
    waits.end_overdue()
    assert is_over(submitted.all[0], words)


def test_a_thread_ends_what_nobody_else_does() -> None:
    words, submitted = torch.zeros(2, 8, dtype=torch.int64), Submitted()
    stream = here()
    waits = StreamWaits(0.01, small=NO_PATH, submit=submitted, mark=stream.mark)
    for tag in (3, 4):  # after a rest, too
        waits.wait(words[:, 0], [1], [tag])
        deadline = time.monotonic() + 60
        while not is_over(submitted[-1][0], words) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert is_over(submitted[-1][0], words)
        stream.num_done += 2
        time.sleep(0.02)


def test_one_wait_or_all_are_given_up() -> None:
    words, submitted = torch.zeros(3, 8, dtype=torch.int64), Submitted()
    waits = StreamWaits(60.0, small=NO_PATH, submit=submitted, mark=here().mark)
    waits.wait(words[:, 0], [0, 1, 2], [5, 6, 7])
    waits.end(words[:, 0], 1, 6)
    assert [is_over(wait, words) for wait in submitted.all] == [False, True, False]
    waits.end(words[:, 0], 1, 5)
    assert int(words[1, 0]) == word(6, NO_PATH, 0), "a later word stays"
    waits.give_up()
    assert all(is_over(wait, words) for wait in submitted.all)


def test_what_cuda_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        @staticmethod
        def cuStreamBatchMemOp_v2(*_: Any) -> int:  # noqa: N802
            return 801

    class CudaStream:
        cuda_stream = 0

    monkeypatch.setattr(stream_waits, "_driver", Driver)
    monkeypatch.setattr(torch.cuda, "current_stream", CudaStream)
    waits = StreamWaits(60.0, small=NO_TREE, mark=here().mark)
    with pytest.raises(OSError, match="error 801"):
        waits.wait(torch.zeros(1, dtype=torch.int64), [0], [2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_stream_waits_until_a_word_comes() -> None:
    words = torch.zeros(2, 8, dtype=torch.int64, pin_memory=True)
    waits, done = StreamWaits(60.0, small=NO_TREE), torch.cuda.Event()
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
