"""A mailbox in shared memory: words that the GPUs of a target and a draft post to each other.

    header                            magic, version, num_slots, width, dtype, GPU of the target,
                                      whether other workers have that GPU, too
    trees  [num_slots, 64] i64        from the draft: node j of the slot's tree is word j
    paths  [num_slots, 16] i64        from the target: token r of the accepted path is word r
    rows   [2, num_slots, 16, width]  from the target: feature rows of paths, by parity of the tag,
                                      unless they go to memory of the draft's GPU (device_memory.py)

A slot is a row of the target's page table. A word is

    bits [40, 63)  round_tag of the round that the word is about
    bits [32, 40)  trees: parent of the node, 255 = there is none; paths: tokens of the path
    bits [0, 32)   token id

An 8-byte store is atomic, so a word is valid if its round_tag is the one that is waited for, and
says nothing about any other round. Tags count rounds and are never 0, so memory that was never
written holds no valid word. Rows have no tag: with a path that is late they may be another round's.
So what lies in a mailbox may be missing, stale or torn. Trees and features may be anything without
harm to the output; a reader sees to it that nothing in a mailbox leads out of bounds.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.device import DTYPES, dtype_name, gpu_uuid
from shared.kernels.mailbox_words import MAX_PATH
from shared.messages import MAX_TREE_NODES
from shared.peer import shared_files
from shared.peer.shared_files import MAILBOXES, RING_DIR, mailbox_name

_MAGIC = b"coppmail"
_VERSION = 3
_HEADER = struct.Struct("<8sIII16s40s?")
_PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped

# Even, so that one after the other they differ in parity, at the end of all too.
NUM_TAGS = (1 << 23) - 2
_FIRST_TAG = 2


class Mailbox:
    """The target's end; the file goes when this does.

    The memory stays registered and mapped as long as any of its tensors lives.

    Args:
        socket_name: Where the target listens for channels.
        width: Of a feature row; 0: no rows.
        dtype: Of the rows, if there are any.
        gpu_is_shared: Other workers have the target's GPU, too.
    Raises: OSError if there is no room, no shared memory, or CUDA cannot register it.
    """

    def __init__(
        self,
        socket_name: str,
        *,
        num_slots: int,
        width: int,
        dtype: torch.dtype | None,
        device: torch.device,
        gpu_is_shared: bool = False,
        directory: Path = RING_DIR,
    ) -> None:
        self.name = mailbox_name(socket_name)
        self.num_slots, self.device = num_slots, device
        assert MAILBOXES.is_name(self.name) and num_slots > 0 and (dtype is not None or not width)
        header = _Header(
            num_slots=num_slots,
            width=width,
            dtype=dtype if width else None,
            gpu=gpu_uuid(device),
            gpu_is_shared=gpu_is_shared,
        )
        path = directory / self.name
        with shared_files.create(path, header.num_bytes) as (fd, memory):
            _write_header(memory, header)
            tensors = _tensors_in(memory, header, device)
        self.trees, self.paths, self.rows = tensors
        self.close = weakref.finalize(self, shared_files.close, path, fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxEnd:
    """A draft's end of a target's mailbox: the same memory.

    It stays registered and mapped as long as any of the tensors lives.
    """

    trees: torch.Tensor
    """[num_slots, 64] i64."""
    paths: torch.Tensor
    """[num_slots, MAX_PATH] i64."""
    rows: torch.Tensor | None
    """[2, num_slots, MAX_PATH, width] of dtype; None if width is 0."""
    num_slots: int
    dtype: torch.dtype | None
    streams_wait: bool = False
    """Workers share the GPU of the target or of the draft: streams wait, no kernel does (see
    stream_waits.py)."""
    may_lend_rows: bool = False
    """Each of the two has a GPU of its own: `rows` may give way to memory of the draft's GPU."""


def open_mailbox(
    socket_name: str,
    *,
    width: int,
    device: torch.device,
    gpu_is_shared: bool = False,
    directory: Path = RING_DIR,
) -> MailboxEnd:
    """Open the mailbox of the target that listens at a channel's name.

    Args:
        width: Of the feature rows that the draft reads; 0: none.
        gpu_is_shared: Other workers have the draft's GPU, too.
    Raises: OSError if there is none, it is of another version or width, its target is on a GPU that
        would wait for a CPU, or CUDA cannot register it.
    """
    fd = MAILBOXES.open(directory, mailbox_name(socket_name), is_writable=True)
    try:
        header = _read_header(fd)
        if header.width != width:
            raise OSError(f"its feature rows have width {header.width}, expected {width}")
        gpu = gpu_uuid(device)
        if header.gpu and not gpu:
            raise OSError("its target is on a GPU, which would wait for a CPU")
        memory = mmap.mmap(fd, header.num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
    trees, paths, rows = _tensors_in(memory, header, device)
    # Workers that share a GPU may be clients of MPS, which maps no memory of who is none.
    is_shared = header.gpu == gpu or gpu_is_shared or header.gpu_is_shared
    return MailboxEnd(
        trees=trees,
        paths=paths,
        rows=rows,
        num_slots=header.num_slots,
        dtype=header.dtype,
        streams_wait=bool(gpu) and is_shared,
        may_lend_rows=bool(gpu) and not is_shared,
    )


def tag_of(base: int, round_idx: int) -> int:
    """Return the round_tag of a round: [2, 2^23), of another parity than that of the round before.

    Args:
        base: Of the request, [0, NUM_TAGS).
    """
    return _FIRST_TAG + (base + round_idx) % NUM_TAGS


def next_tag(round_tag: int) -> int:
    """Return the round_tag of the round after."""
    return tag_of(round_tag - _FIRST_TAG, 1)


def is_tag(value: int) -> bool:
    """Return whether a number can be a round_tag."""
    return _FIRST_TAG <= value < _FIRST_TAG + NUM_TAGS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    num_slots: int
    width: int
    dtype: torch.dtype | None
    gpu: str
    """UUID; empty on a CPU."""
    gpu_is_shared: bool

    @property
    def regions(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of each region."""
        regions: list[tuple[torch.dtype, tuple[int, ...]]] = [
            (torch.int64, (self.num_slots, MAX_TREE_NODES)),
            (torch.int64, (self.num_slots, MAX_PATH)),
        ]
        if self.dtype is not None:
            regions.append((self.dtype, (2, self.num_slots, MAX_PATH, self.width)))
        return regions

    @property
    def num_bytes(self) -> int:
        """Return the size of the file: each region begins with a page, as the header does."""
        return mmap.PAGESIZE + sum(_page_bytes(*region) for region in self.regions)


def _page_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    num_bytes = dtype.itemsize * math.prod(shape)
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _write_header(memory: mmap.mmap, header: _Header) -> None:
    dtype = "" if header.dtype is None else dtype_name(header.dtype)
    names = dtype.encode(), header.gpu.encode()
    numbers = header.num_slots, header.width
    _HEADER.pack_into(memory, 0, _MAGIC, _VERSION, *numbers, *names, header.gpu_is_shared)


def _read_header(fd: int) -> _Header:
    data = os.pread(fd, _HEADER.size, 0)
    if len(data) == _HEADER.size:
        magic, version, num_slots, width, *names, gpu_is_shared = _HEADER.unpack(data)
        dtype, gpu = (name.rstrip(b"\0").decode(errors="replace") for name in names)
        if (magic, version) == (_MAGIC, _VERSION) and (dtype in DTYPES if width else not dtype):
            header = _Header(
                num_slots=num_slots,
                width=width,
                dtype=DTYPES.get(dtype),
                gpu=gpu,
                gpu_is_shared=gpu_is_shared,
            )
            if num_slots and os.fstat(fd).st_size == header.num_bytes:
                return header
    raise OSError("it is not a mailbox of this version")


def _tensors_in(
    memory: mmap.mmap, header: _Header, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return trees, paths and rows, which keep the memory mapped and registered."""
    data = np.frombuffer(memory, np.uint8)
    if device.type == "cuda":
        _register(data, memory, device)
    whole = torch.from_numpy(data)
    tensors: list[torch.Tensor] = []
    begin = mmap.PAGESIZE
    for dtype, shape in header.regions:
        num_bytes = dtype.itemsize * math.prod(shape)
        tensors.append(whole[begin : begin + num_bytes].view(dtype).view(shape))
        begin += _page_bytes(dtype, shape)
    trees, paths, *rows = tensors
    return trees, paths, rows[0] if rows else None


def _register(data: NDArray[np.uint8], memory: mmap.mmap, device: torch.device) -> None:
    """Let every GPU of this process access an array's memory, as long as the array lives.

    Args:
        memory: What the array is a view of.
    Raises: OSError if CUDA refuses.
    """
    runtime = torch.cuda.cudart()
    address = data.ctypes.data
    result = runtime.cudaHostRegister(address, data.nbytes, _PORTABLE_MAPPED)
    if result != runtime.cudaError.success:
        # CUDA reports a failed call once more at the next launch, whatever that is: let it be this.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
        reason = runtime.cudaGetErrorString(result)
        raise OSError(f"CUDA cannot register shared memory: {reason} ({int(result)})")
    weakref.finalize(data, _unregister, runtime.cudaHostUnregister, address, memory)


def _unregister(unregister: Callable[[int], Any], address: int, memory: mmap.mmap) -> None:
    """Undo a registration; `memory` stays mapped until that is done."""
    unregister(address)
