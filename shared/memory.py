"""Python's garbage collector and the allocator below it, in processes that serve."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import Coroutine
from typing import Any

TRIM_INTERVAL_S = 30.0
_GC_THRESHOLD = 10_000
# Numbers of mallopt in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 2 << 20
_KEPT_BYTES = 32 << 20
_NUM_ARENAS = 2


def settle_garbage() -> None:
    """Exempt all that lives now from collection, and look at the rest less often.

    What is loaded stays; looking through it would hold everything up for tens of milliseconds now
    and then. Messages and requests hold no cycles, so there is little to find: gRPC leaves five
    objects per call, 0.4 KiB, so less than 1 MiB waits. To collect the youngest generation now and
    then would make it more: calls that live meanwhile get older, and a process with little to do
    would never come to look at older generations.

    Mutates: the collector of this process.
    """
    gc.collect()  # what loading left behind would be kept for ever with the rest
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


async def tended(work: Coroutine[Any, Any, None], *, interval_s: float = TRIM_INTERVAL_S) -> None:
    """Run the work of a process that serves, and give back free memory beside it.

    Args:
        interval_s: Between two times that free memory is given back, seconds.
    Mutates: the allocator of this process; nothing without glibc.
    """
    return_large_buffers()
    trimming = asyncio.create_task(_trim(interval_s))
    try:
        await work
    finally:
        trimming.cancel()


async def _trim(interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        return_free_memory()


def return_free_memory() -> None:
    """Give what is free in the heap back to the system; does nothing without glibc.

    glibc keeps what is free between blocks that are not: tens of megabytes, for good, after a burst
    of messages of some 100 KB. Giving them back takes about a millisecond.

    Mutates: the allocator of this process.
    """
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def return_large_buffers() -> None:
    """Have large buffers go back to the system when they are freed; does nothing without glibc.

    Once it has freed a large buffer glibc keeps the next ones for reuse, in an arena per thread: a
    few messages of 16 MB that were refused at once would leave a gigabyte behind.

    Mutates: the allocator of this process.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_ARENA_MAX, _NUM_ARENAS)


def _glibc() -> ctypes.CDLL | None:
    """Return the C library, if it has what is called here."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
