"""A ring of feature rows in shared memory: a target writes, drafts on its host read.

    [0, 64)               magic, nonce, capacity
    [64, 72)              claimed: bytes that the writer has begun to write since the start
    [4096, 4096 + capacity)  rows; byte i of everything ever written lies at i % capacity

A span is named by its place in the stream of everything ever written, which never repeats. The
writer raises `claimed` before it overwrites anything, and waits for nobody. A reader copies first
and looks at `claimed` after: rows that were overwritten meanwhile are never used.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.messages import RingSpan
from shared.peer import shared_files
from shared.peer.shared_files import RING_DIR, RINGS

logger = logging.getLogger(__name__)

NONCE_BYTES = 16
_MAGIC = b"coppice1"
_HEADER = struct.Struct(f"<8s{NONCE_BYTES}sQ")
_CLAIMED = 64
_DATA = 4096
_ALIGNMENT = 64
# The last of these parts before the place of writing count as overwritten: `claimed` may become
# visible a little after what was written, where memory is ordered weakly.
_NUM_PARTS = 8


class FeatureRing:
    """The writer's end; the file goes when this does.

    Args:
        num_bytes: Of rows; rounded up to whole pages.
    Raises: OSError if there is no room, or no shared memory at all.
    """

    def __init__(self, num_bytes: int, *, directory: Path = RING_DIR) -> None:
        self.capacity = max(-(-num_bytes // mmap.PAGESIZE), _NUM_PARTS) * mmap.PAGESIZE
        self.name = RINGS.new_name()
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        path = directory / self.name
        with shared_files.create(path, _DATA + self.capacity) as (fd, memory):
            _HEADER.pack_into(memory, 0, _MAGIC, self.nonce, self.capacity)
        self._claimed = np.frombuffer(memory, np.uint64, count=1, offset=_CLAIMED)
        self._data = np.frombuffer(memory, np.uint8, offset=_DATA)
        self._end = 0
        self.close = weakref.finalize(self, shared_files.close, path, fd)
        self.start_step()

    def start_step(self) -> None:
        """Let half of the ring be written; readers have the other half to keep up."""
        self._burst_end = self._end + self.capacity // 2

    def write(self, *parts: NDArray[np.uint8]) -> RingSpan | None:
        """Write rows over the oldest ones, one part after the other.

        Args:
            parts: [n, row_bytes] u8 each.
        Returns: Where they lie; None if they are too many at a time.
        """
        span = self.claim(sum([rows.nbytes for rows in parts]))
        if span is not None:
            self.fill(span, parts)
        return span

    def claim(self, num_bytes: int) -> RingSpan | None:
        """Take the place of the oldest rows, to be filled before a reader hears of it.

        Returns: None if these are too many bytes at a time.
        """
        begin = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        offset = begin % self.capacity
        if offset + num_bytes > self.capacity:  # a span never wraps
            begin, offset = begin + self.capacity - offset, 0
        end = begin + num_bytes
        if num_bytes > self.capacity // _NUM_PARTS or end > self._burst_end:
            return None
        self._claimed[0] = self._end = end
        return RingSpan(ring=self.name, begin=begin, num_bytes=num_bytes)

    def fill(self, span: RingSpan, parts: Sequence[NDArray[np.uint8]]) -> None:
        """Write rows to a place that was claimed; they take all of it."""
        np.concatenate(parts, out=self.at(span).reshape(-1, parts[0].shape[1]))

    def at(self, span: RingSpan) -> NDArray[np.uint8]:
        """Return the bytes of a place that was claimed, for filling before a reader hears of it."""
        offset = span.begin % self.capacity
        return self._data[offset : offset + span.num_bytes]


class RingReader:
    """The reader's end of any number of rings; each is mapped at its first span."""

    def __init__(self, directory: Path = RING_DIR) -> None:
        self._directory = directory
        self._mapped: dict[str, _MappedRing] = {}
        self._logged = ""  # the ring of which it was said last that it cannot be read

    def read(self, span: RingSpan) -> NDArray[np.uint8] | None:
        """Return a copy of a span's bytes; None if they, or the whole ring, are gone."""
        ring = self._mapped.get(span.ring)
        if ring is None:
            self._forget_removed()
            try:
                ring = self._mapped[span.ring] = _MappedRing(self._directory, span.ring)
            except OSError as error:
                if self._logged != span.ring:  # every round of every request may ask
                    logger.warning("feature ring %s cannot be read: %s", span.ring, error)
                self._logged = span.ring
                return None
        return ring.read(span)

    def _forget_removed(self) -> None:
        """Unmap rings whose target has ended."""
        for name in list(self._mapped):
            if not (self._directory / name).exists():
                del self._mapped[name]


class _MappedRing:
    def __init__(self, directory: Path, name: str) -> None:
        fd = RINGS.open(directory, name)
        try:
            _, self._capacity = _read_header(fd)
            # All pages now: else every first read of a page is a fault, in the middle of a round.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            memory = mmap.mmap(fd, _DATA + self._capacity, flags, mmap.PROT_READ)
        finally:
            os.close(fd)
        self._claimed = np.frombuffer(memory, np.uint64, count=1, offset=_CLAIMED)
        self._data = np.frombuffer(memory, np.uint8, offset=_DATA)

    def read(self, span: RingSpan) -> NDArray[np.uint8] | None:
        offset = span.begin % self._capacity
        if offset + span.num_bytes > self._capacity or not self._is_intact(span):
            return None
        copy = self._data[offset : offset + span.num_bytes].copy()
        return copy if self._is_intact(span) else None

    def _is_intact(self, span: RingSpan) -> bool:
        claimed = int(self._claimed[0])
        oldest = claimed - self._capacity + self._capacity // _NUM_PARTS
        return oldest <= span.begin and span.begin + span.num_bytes <= claimed


def read_nonce(name: str, *, directory: Path = RING_DIR) -> bytes:
    """Return what the writer of a ring put into it, which proves that the memory is shared.

    Raises: OSError if there is no such ring here.
    """
    fd = RINGS.open(directory, name)
    try:
        return _read_header(fd)[0]
    finally:
        os.close(fd)


def _read_header(fd: int) -> tuple[bytes, int]:
    """Return nonce and capacity."""
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) == _HEADER.size:
        magic, nonce, capacity = _HEADER.unpack(header)
        if magic == _MAGIC and capacity and os.fstat(fd).st_size == _DATA + capacity:
            return nonce, capacity
    raise OSError("it is not a feature ring of this version")
