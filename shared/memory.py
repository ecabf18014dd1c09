"""Python's garbage collector and the allocator below it, in processes that serve."""

from __future__ import annotations

import ctypes
import gc
import sys

_GC_THRESHOLD = 50_000
# Numbers of mallopt in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 2 << 20
_KEPT_BYTES = 32 << 20
_NUM_ARENAS = 2


def settle_garbage() -> None:
    """Exempt all that lives now from collection, and look at the rest less often.

    What is loaded stays; looking through it would hold everything up for tens of milliseconds now
    and then. Messages hold no cycles, so there is next to nothing to find.

    Mutates: the collector of this process.
    """
    gc.collect()  # what loading left behind would be kept for ever with the rest
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def return_large_buffers() -> None:
    """Have large buffers go back to the system when they are freed; does nothing without glibc.

    Once it has freed a large buffer glibc keeps the next ones for reuse, in an arena per thread: a
    few messages of 16 MB that were refused at once would leave a gigabyte behind.

    Mutates: the allocator of this process.
    """
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_ARENA_MAX, _NUM_ARENAS)
