"""Memory of a GPU that another process's GPU writes to, over NVLink or PCIe: CUDA IPC.

Whose GPU it is lends it: allocates it, and sends a handle of it, which costs nothing. The other one
borrows it: maps it, and hands its address to kernels. Neither has to see the other's GPU, so
CUDA_VISIBLE_DEVICES may hide it ("may not be visible in the process calling the API"); a container
without it, or in other namespaces, cannot map it, nor can a GPU without access to it.

CUDA promises that the memory is there until it is freed, and wants all to have unmapped it before
that. Of a lender that dies it says nothing. What is relied upon is that the driver counts who has
mapped an allocation, and keeps it for the last one: its kernel module takes a reference for each
mapping, "so it can't go away under us" (open-gpu-kernel-modules, uvm_map_external.c). So what is
being stored when the lender is killed ends up in memory that nobody reads: on two H200s thousands
of launches that wrote there went on without an error.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__DEVICE.html
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import secrets
from typing import Any, Protocol

import torch

from shared.device import gpu_uuid
from shared.messages import ROWS_HANDLE_BYTES

logger = logging.getLogger(__name__)

# Small allocations are parts of such blocks, and a handle is of the whole block.
_BLOCK_BYTES = 2 << 20
_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_PROOF_BYTES = 16


class Lent(Protocol):
    """Memory of this process's GPU that others may map."""

    @property
    def data(self) -> torch.Tensor:
        """Return it: [num_bytes] u8, zeros at first."""

    @property
    def handle(self) -> bytes:
        """Return what others map it by, 64 bytes."""

    def free(self) -> None:
        """Give it back to the GPU: nobody has it mapped, nor is `data` read any more."""


class Borrowed(Protocol):
    """Memory of another GPU that kernels of this process may write to."""

    @property
    def address(self) -> int:
        """Return where it is mapped."""

    def close(self) -> None:
        """Unmap it, once this process's GPU has done all that it was given."""


class PeerMemory(Protocol):
    """Lends and borrows memory, for one GPU."""

    @property
    def gpu(self) -> str:
        """Return the GPU's UUID."""

    def lend(self, num_bytes: int) -> Lent:
        """Allocate memory for others. Raises: OSError if CUDA refuses."""

    def borrow(self, handle: bytes, gpu: str, num_bytes: int) -> Borrowed:
        """Map memory that another process lends.

        Args:
            handle: 64 bytes, of that process.
            gpu: Whose memory it is, a UUID.
            num_bytes: It must have.
        Raises: OSError if that is this GPU, if it cannot write there, or CUDA refuses.
        """


class CudaMemory:
    """Memory that CUDA lends and borrows; the GPU is the current device of the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def gpu(self) -> str:
        return gpu_uuid(self._device)

    def lend(self, num_bytes: int) -> _CudaLent:
        size, address = -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES, ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        handle = _Handle()
        try:
            _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
            # Not on the current stream, which may be waiting for a path.
            with _stream() as stream:
                zeros = ctypes.c_ubyte(0), ctypes.c_size_t(size)
                _call("cuMemsetD8Async", address, *zeros, stream)
                _call("cuStreamSynchronize", stream)
            return _CudaLent(_bytes_at(address.value, num_bytes, self._device), bytes(handle))
        except BaseException:
            with contextlib.suppress(OSError):
                _call("cuMemFree_v2", address)
            raise

    def borrow(self, handle: bytes, gpu: str, num_bytes: int) -> _CudaBorrowed:
        if gpu == self.gpu:
            raise OSError("it is memory of this GPU")
        seen = _index_of(gpu)
        own = torch.cuda.current_device() if self._device.index is None else self._device.index
        if seen is not None and not torch.cuda.can_device_access_peer(own, seen):
            raise OSError("this GPU has no access to the other one's memory")
        address = ctypes.c_uint64()
        flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
        _call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), flags
        )
        borrowed = _CudaBorrowed(address.value)
        try:
            _require_size(address, num_bytes)
            _require_writes(address)
        except BaseException:
            borrowed.close()
            raise
        return borrowed


class _Handle(ctypes.Structure):
    """A CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * ROWS_HANDLE_BYTES),)


class _CudaLent:
    def __init__(self, data: torch.Tensor, handle: bytes) -> None:
        self.data, self.handle = data, handle
        self._address = ctypes.c_uint64(data.data_ptr())

    def free(self) -> None:
        _call("cuMemFree_v2", self._address)


class _CudaBorrowed:
    def __init__(self, address: int) -> None:
        self.address = address

    def close(self) -> None:
        """Unmap it. What CUDA says against that is logged: it may be the lender's death."""
        try:
            _call("cuCtxSynchronize")
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(self.address))
        except OSError as error:
            logger.warning("memory of another GPU stays mapped: %s", error)


def _require_size(address: ctypes.c_uint64, num_bytes: int) -> None:
    """Raise OSError unless what is mapped at an address has so many bytes."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    found = base.value + size.value - address.value
    if found < num_bytes:
        raise OSError(f"it has {found} bytes, expected {num_bytes}")


def _require_writes(address: ctypes.c_uint64) -> None:
    """Raise OSError unless what this GPU writes at an address is there: some machines' PCIe
    switches say that GPUs reach each other, and lose what these write.
    """
    written = secrets.token_bytes(_PROOF_BYTES)
    read, size = ctypes.create_string_buffer(_PROOF_BYTES), ctypes.c_size_t(_PROOF_BYTES)
    with _stream() as stream:
        _call("cuMemcpyHtoDAsync_v2", address, ctypes.c_char_p(written), size, stream)
        _call("cuMemcpyDtoHAsync_v2", read, address, size, stream)
        _call("cuStreamSynchronize", stream)
    if read.raw != written:
        raise OSError("what this GPU writes there is lost")


@contextlib.contextmanager
def _stream() -> Any:
    """Yield a stream that waits for no other."""
    stream = ctypes.c_void_p()
    _call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
    try:
        yield stream
    finally:
        _call("cuStreamDestroy_v2", stream)


def _bytes_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory of a GPU as a tensor, [num_bytes] u8, which does not own it."""

    class Array:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }

    return torch.as_tensor(Array(), device=device)


def _index_of(gpu: str) -> int | None:
    """Return which device of this process a GPU is; None: this process does not see it."""
    devices = range(torch.cuda.device_count())
    return next((i for i in devices if gpu_uuid(torch.device("cuda", i)) == gpu), None)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver, in the current context. Raises: OSError if it fails."""
    result = getattr(_driver(), name)(*arguments)
    if result != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(text))
        raise OSError(f"{name}: {(text.value or b'').decode() or 'error'} ({result})")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
