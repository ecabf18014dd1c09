"""Tensors of a step come to the host side by side, whatever their dtypes and shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shared.step import read_back
from shared.step.read_back import PendingRead, ReadBack, ReadClock


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_every_dtype_and_shape_keeps_its_values(device: torch.device) -> None:
    sources = {
        "ids": torch.arange(7, dtype=torch.int32),
        "wide": torch.randn(5, 3),
        "bytes": torch.randint(0, 256, (3,), dtype=torch.uint8),
        "none": torch.zeros(0, 4),
        "long": torch.randint(-(2**62), 2**62, (2, 2)),
        "half": torch.randn(2, 3).half(),
    }
    rows = torch.tensor([[4, 0, 0], [2, 2, 1]])
    read = ReadBack(device)
    for name, source in sources.items():
        read.add(name, source.to(device))
    read.add("rows", sources["wide"].to(device), rows.to(device))
    read.add("empty rows", torch.zeros(5, 0, device=device), rows.to(device))
    read.add("row ids", sources["ids"].to(device), rows[0].to(device))
    arrays = read.start().wait()
    for name, source in sources.items():
        assert arrays[name].dtype == source.numpy().dtype
        assert np.array_equal(arrays[name], source.numpy())
    assert np.array_equal(arrays["rows"], sources["wide"][rows].numpy())
    assert arrays["empty rows"].shape == (2, 3, 0)
    assert arrays["row ids"].tolist() == [4, 0, 0]


def test_bfloat16_comes_as_bytes(device: torch.device) -> None:
    source = torch.randn(4, 6).bfloat16()
    read = ReadBack(device)
    read.add("rows", source.to(device), torch.tensor([[3], [1]]).to(device))
    array = read.start().wait()["rows"]
    assert array.dtype == np.uint8 and array.shape == (2, 1, 12)
    found = torch.from_numpy(array.copy()).view(torch.bfloat16)
    assert torch.equal(found[:, 0], source[[3, 1]])


def test_what_was_read_may_be_overwritten_at_once(device: torch.device) -> None:
    """As a captured graph does that runs again: the copy comes first on the stream."""
    source = torch.arange(1000, device=device)
    read = ReadBack(device)
    read.add("values", source)
    pending = read.start()
    source.zero_()
    assert pending.wait()["values"].tolist() == list(range(1000))


def test_nothing_to_read(device: torch.device) -> None:
    assert ReadBack(device).start().wait() == {}


def test_a_name_is_read_once(device: torch.device) -> None:
    read = ReadBack(device)
    read.add("a", torch.zeros(1, device=device))
    with pytest.raises(AssertionError, match="a is read twice"):
        read.add("a", torch.zeros(1, device=device))


class FakeEvent:
    """An event of a stream, at so many milliseconds of its clock."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at_ms - self.at_ms


def test_reads_end_by_the_clock_of_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the host hears of it, but for the first one."""
    host_s = iter([100.0])
    monkeypatch.setattr(read_back.time, "monotonic", lambda: next(host_s))
    clock = ReadClock()
    ends_s = []
    for at_ms in (5.0, 12.0, 40.5):
        read: Any = FakeEvent(at_ms)
        clock.note(PendingRead({}, torch.empty(0), read))
        ends_s.append(clock.ended_s())
    assert ends_s == pytest.approx([100.0, 100.007, 100.0355])


def test_reads_of_a_cpu_end_when_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    host_s = iter([1.0, 1.5])
    monkeypatch.setattr(read_back.time, "monotonic", lambda: next(host_s))
    clock = ReadClock()
    for end_s in (1.0, 1.5):
        clock.note(ReadBack(torch.device("cpu")).start())
        assert clock.ended_s() == end_s


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_reads_of_a_gpu_end_in_time() -> None:
    clock, ends_s = ReadClock(), []
    for _ in range(3):
        read = ReadBack(torch.device("cuda"))
        read.add("values", torch.ones(5, device="cuda"))
        torch.cuda._sleep(1_000_000)
        pending = read.start()
        pending.wait()
        clock.note(pending)
        ends_s.append(clock.ended_s())
    assert 0 < ends_s[1] - ends_s[0] < 1 and 0 < ends_s[2] - ends_s[1] < 1
