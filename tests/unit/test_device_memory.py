"""Memory that GPUs lend each other: what is asked of CUDA's driver, and what it refuses."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.peer import device_memory
from shared.peer.device_memory import CudaMemory

GPU = torch.device("cuda", 0)
OWN, OTHER, HIDDEN = "GPU-own", "GPU-other", "GPU-hidden"
MIB = 1 << 20
INVALID_VALUE = 1


class FakeDriver:
    """A driver of one GPU of two, whose memory is the host's; all arguments are as C has them.

    Args:
        refused: Functions that fail.
        exported: What another process lends, by handle.
    """

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.exported: dict[bytes, ctypes.Array[Any]] = {}
        self.allocated: dict[int, ctypes.Array[Any]] = {}
        self.mapped: dict[int, ctypes.Array[Any]] = {}
        self.num_streams = 0
        self.num_synchronized = 0
        self.loses_writes = False

    def __getattr__(self, name: str) -> Any:
        function = getattr(type(self), f"do_{name}")

        def call(*arguments: Any) -> int:
            if name in self.refused:
                return INVALID_VALUE
            function(self, *arguments)
            return 0

        return call

    def do_cuMemAlloc_v2(self, address: Any, size: Any) -> None:  # noqa: N802
        memory = (ctypes.c_ubyte * size.value)(1)
        address._obj.value = ctypes.addressof(memory)
        self.allocated[address._obj.value] = memory

    def do_cuMemFree_v2(self, address: Any) -> None:  # noqa: N802
        del self.allocated[address.value]

    def do_cuIpcGetMemHandle(self, handle: Any, address: Any) -> None:  # noqa: N802
        text = str(address.value).encode().ljust(64)
        handle._obj.reserved[:] = text
        self.exported[text] = self.allocated[address.value]

    def do_cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> None:  # noqa: N802
        assert flags.value == 1 and ctypes.sizeof(handle) == 64
        memory = self.exported[bytes(handle)]
        address._obj.value = ctypes.addressof(memory)
        self.mapped[address._obj.value] = memory

    def do_cuIpcCloseMemHandle(self, address: Any) -> None:  # noqa: N802
        assert self.num_synchronized, "kernels may be writing there"
        del self.mapped[address.value]

    def do_cuCtxSynchronize(self) -> None:  # noqa: N802
        self.num_synchronized += 1

    def do_cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> None:  # noqa: N802
        base._obj.value, size._obj.value = address.value, len(self.mapped[address.value])

    def do_cuStreamCreate(self, stream: Any, flags: Any) -> None:  # noqa: N802
        assert flags.value == 1, "it waits for nothing"
        stream._obj.value = 99
        self.num_streams += 1

    def do_cuStreamDestroy_v2(self, stream: Any) -> None:  # noqa: N802
        assert stream.value == 99
        self.num_streams -= 1

    def do_cuStreamSynchronize(self, stream: Any) -> None:  # noqa: N802
        assert stream.value == 99

    def do_cuMemsetD8Async(self, address: Any, value: Any, size: Any, stream: Any) -> None:  # noqa: N802
        assert stream.value == 99
        ctypes.memset(address.value, value.value, size.value)

    def do_cuMemcpyHtoDAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> None:  # noqa: N802
        if not self.loses_writes:
            ctypes.memmove(to.value, source, size.value)

    def do_cuMemcpyDtoHAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> None:  # noqa: N802
        ctypes.memmove(to, source.value, size.value)

    def do_cuGetErrorName(self, result: int, text: Any) -> None:  # noqa: N802
        text._obj.value = {INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE"}[result]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    uuids = [OWN, OTHER]

    def bytes_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    monkeypatch.setattr(device_memory, "_driver", lambda: fake)
    monkeypatch.setattr(device_memory, "_bytes_at", bytes_at)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=uuids[device.index]),
    )
    yield fake
    assert fake.num_streams == 0


def export(driver: FakeDriver, num_bytes: int = 2 * MIB) -> bytes:
    """Return the handle of what another process lends."""
    handle = b"another's".ljust(64)
    driver.exported[handle] = (ctypes.c_ubyte * num_bytes)()
    return handle


def test_what_is_lent_is_whole_blocks_of_zeros(driver: FakeDriver) -> None:
    """A part of a block would lend the neighbours as well."""
    memory = CudaMemory(GPU)
    lent = memory.lend(3 * MIB)
    assert memory.gpu == OWN and len(lent.handle) == 64
    assert lent.data.shape == (3 * MIB,) and not lent.data.any()
    ((address, block),) = driver.allocated.items()
    assert len(block) == 4 * MIB and lent.data.data_ptr() == address
    lent.free()
    assert driver.allocated == {}


@pytest.mark.parametrize(
    "function", ["cuMemAlloc_v2", "cuIpcGetMemHandle", "cuStreamCreate", "cuMemsetD8Async"]
)
def test_what_cannot_be_lent_is_an_error_that_leaves_nothing(
    driver: FakeDriver, function: str
) -> None:
    driver.refused.add(function)
    with pytest.raises(OSError, match=rf"{function}: CUDA_ERROR_INVALID_VALUE \(1\)"):
        CudaMemory(GPU).lend(MIB)
    assert driver.allocated == {}


@pytest.mark.parametrize("gpu", [OTHER, HIDDEN])
def test_what_is_borrowed_is_mapped_until_it_is_closed(driver: FakeDriver, gpu: str) -> None:
    """Whether or not this process sees the GPU."""
    borrowed = CudaMemory(GPU).borrow(export(driver), gpu, 2 * MIB)
    assert list(driver.mapped) == [borrowed.address]
    assert not driver.num_synchronized
    borrowed.close()
    assert driver.mapped == {} and driver.num_synchronized


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("own", "memory of this GPU"),
        ("no access", "no access"),
        ("small", f"it has {2 * MIB} bytes, expected {2 * MIB + 1}"),
        ("lost", "is lost"),
        ("cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE"),
        ("cuMemGetAddressRange_v2", "cuMemGetAddressRange_v2"),
        ("cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync_v2"),
    ],
)
def test_what_cannot_be_borrowed_is_an_error_that_leaves_nothing(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, case: str, text: str
) -> None:
    driver.refused.add(case)
    driver.loses_writes = case == "lost"
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda own, other: case != "no access"
    )
    num_bytes = 2 * MIB + (case == "small")
    with pytest.raises(OSError, match=text):
        CudaMemory(GPU).borrow(export(driver), OWN if case == "own" else OTHER, num_bytes)
    assert driver.mapped == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_gpu_lends_memory() -> None:
    torch.ones(1, device=GPU)
    memory = CudaMemory(GPU)
    lent = memory.lend(3 * MIB)
    rows = lent.data.view(torch.bfloat16).view(3, -1)
    assert rows.device == GPU and not rows.any() and len(lent.handle) == 64
    rows[2] = 5.0
    assert int(lent.data.count_nonzero()) > 0
    with pytest.raises(OSError, match="memory of this GPU"):
        memory.borrow(lent.handle, memory.gpu, 3 * MIB)
    with pytest.raises(OSError, match="CUDA_ERROR"):
        memory.borrow(bytes(64), HIDDEN, 3 * MIB)
    lent.free()
    torch.ones(1, device=GPU)


@pytest.mark.parametrize("function", ["cuCtxSynchronize", "cuIpcCloseMemHandle"])
def test_what_cannot_be_closed_is_said(
    driver: FakeDriver, function: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lender may be dead."""
    caplog.set_level(logging.WARNING)
    borrowed = CudaMemory(GPU).borrow(export(driver), OTHER, MIB)
    driver.refused.add(function)
    borrowed.close()
    assert f"stays mapped: {function}" in caplog.text
