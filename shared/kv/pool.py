"""Paged KV cache of one model: page tables, reservations, slots.

Slots are logical: token (or tree node) s of a request is logical slot s, and page_slots.py says
which slot of the caches that is, so page_size never matters above.
KV ownership of a request, in logical slots:

    [0, dropped)          freed: below the sliding window, page table entry 0
    [dropped, seq_len)    committed
    [seq_len, reserved)   scratch of the round in progress, and headroom
"""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.move_kv import group_caches
from shared.kernels.page_slots import slots_in
from shared.kv.allocator import SINK_PAGE, PageAllocator, PageId
from shared.kv.layout import KVLayout
from shared.step.staging import Staging


class KVPool:
    """The caches of every layer, and the page table of every request.

    Args:
        layout: Which caches.
        num_pages: Pages in all, the sink included.
        max_num_requests: Rows of the page table.
        max_pages_per_request: Columns of the page table.
    """

    def __init__(
        self,
        *,
        layout: KVLayout,
        num_pages: int,
        page_size: int,
        max_num_requests: int,
        max_pages_per_request: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.device = device
        self.layers = [
            tuple(_zeros(shape, dtype, device) for shape in shapes)
            for shapes in layout.cache_shapes(num_pages * page_size)
        ]
        # Where caches lie, for `move_paths`: they never move.
        self.cache_groups = group_caches(self.caches)
        self._allocator = PageAllocator(num_pages)
        self._table = np.zeros((max_num_requests, max_pages_per_request), dtype=np.int32)
        self._device_table = torch.from_numpy(self._table).to(device)
        self._is_table_shared = device.type == "cpu"
        # Entries that changed since the device's table was brought up to date, flat.
        self._changed: list[int] = []
        self._free_rows = list(range(max_num_requests - 1, -1, -1))
        self._pages: dict[int, list[PageId]] = {}  # row -> pages of columns [first, ...)
        self._first: dict[int, int] = {}  # row -> first column still held
        self._slots: dict[int, array[int]] = {}  # row -> the slots of its pages, i32

    @property
    def caches(self) -> list[torch.Tensor]:
        """Return the caches of all layers, [num_slots, Hkv, width] each; see KVLayout."""
        return [cache for layer in self.layers for cache in layer]

    @property
    def num_free_pages(self) -> int:
        """Return how many pages can still be reserved."""
        return self._allocator.num_free

    @property
    def num_pages(self) -> int:
        """Return how many pages requests can hold; excludes the sink."""
        return self._allocator.num_pages - 1

    @property
    def max_num_requests(self) -> int:
        """Return the rows of the page table."""
        return self._table.shape[0]

    @property
    def has_free_row(self) -> bool:
        """Return whether another request fits into the page table."""
        return bool(self._free_rows)

    @property
    def page_table(self) -> torch.Tensor:
        """Return [max_num_requests, max_pages_per_req] i32 on the device, as it was last staged."""
        return self._device_table

    @property
    def is_page_table_behind(self) -> bool:
        """Return whether `stage_page_table` has something to bring."""
        return bool(self._changed)

    def stage_page_table(self, staging: Staging) -> torch.Tensor:
        """Return the page table, which is up to date after the next flush of `staging`."""
        if self._changed:
            count = len(self._changed)
            # A few sizes, as staging keeps a layout of each: the last entry is set again.
            padding = (1 << (count - 1).bit_length()) - count
            index = np.array(self._changed + self._changed[-1:] * padding)
            staging.update(self._device_table.view(-1), index, self._table.reshape(-1)[index])
            self._changed.clear()
        return self._device_table

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens` logical slots."""
        return -(-num_tokens // self.page_size)

    def acquire(self) -> int:
        """Take a row of the page table; it holds no pages yet."""
        req_idx = self._free_rows.pop()
        self._pages[req_idx] = []
        self._first[req_idx] = 0
        self._slots[req_idx] = array("i")
        return req_idx

    def release(self, req_idx: int) -> None:
        """Free the row and every page it holds."""
        first, pages = self._first.pop(req_idx), self._pages.pop(req_idx)
        del self._slots[req_idx]
        self._allocator.free(pages)
        self._set(req_idx, first, [SINK_PAGE] * len(pages))
        self._free_rows.append(req_idx)

    def reserve(self, req_idx: int, num_tokens: int) -> None:
        """Make logical slots [.., num_tokens) writable.

        Raises: OutOfPagesError, with nothing changed.
        """
        first, pages = self._first[req_idx], self._pages[req_idx]
        have = first + len(pages)
        if num_tokens <= have * self.page_size:
            return
        need = self.pages_for(num_tokens)
        assert need <= self._table.shape[1], f"{num_tokens} tokens exceed the page table row"
        new = self._allocator.alloc(need - have)
        self._set(req_idx, have, new)
        pages.extend(new)
        slots, size = self._slots[req_idx], self.page_size
        for page in new:
            slots.extend(range(page * size, page * size + size))

    def drop_before(self, req_idx: int, slot: int) -> None:
        """Free the whole pages below logical slot `slot`: nothing looks there any more."""
        first, pages = self._first[req_idx], self._pages[req_idx]
        count = min(max(slot // self.page_size - first, 0), len(pages))
        if count == 0:
            return
        self._allocator.free(pages[:count])
        self._set(req_idx, first, [SINK_PAGE] * count)
        del pages[:count]
        del self._slots[req_idx][: count * self.page_size]
        self._first[req_idx] = first + count

    def slots(
        self, req_idx: int | NDArray[np.integer], logical: NDArray[np.integer]
    ) -> NDArray[np.int32]:
        """Map logical slots to slots of the caches.

        Args:
            req_idx: Of one request, or [n], one for each slot.
            logical: [n], every one inside the reservation.
        Returns: [n] i32. Never a slot of the sink.
        """
        slots = slots_in(self._table, req_idx, logical, self.page_size).astype(np.int32)
        assert (slots // self.page_size != SINK_PAGE).all(), "a live row maps to the sink page"
        return slots

    def reserved_len(self, req_idx: int) -> int:
        """Return where the reservation of a row ends, in logical slots."""
        return (self._first[req_idx] + len(self._pages[req_idx])) * self.page_size

    def num_held_pages(self, req_idx: int) -> int:
        """Return how many pages a row holds."""
        return len(self._pages[req_idx])

    def holds(self, req_idx: int, start: int, stop: int) -> bool:
        """Return whether logical slots [start, stop) lie inside the reservation."""
        first = self._first[req_idx]
        return first <= start // self.page_size and stop <= self.reserved_len(req_idx)

    def slot_range(self, req_idx: int, start: int, stop: int) -> array[int]:
        """Return the slots of logical slots [start, stop), i32, all inside the reservation."""
        slots, below = self._slots[req_idx], self._first[req_idx] * self.page_size
        assert below <= start and stop <= below + len(slots), "a live row maps to the sink page"
        return slots[start - below : stop - below]

    def _set(self, req_idx: int, first: int, pages: Sequence[PageId]) -> None:
        """Write columns [first, first + len(pages)) of a row of the page table."""
        self._table[req_idx, first : first + len(pages)] = pages
        if not self._is_table_shared:
            begin = req_idx * self._table.shape[1] + first
            self._changed += range(begin, begin + len(pages))

    def check_integrity(self) -> None:
        """Raise unless pages and rows are all accounted for."""
        self._allocator.check_integrity(self._pages.values())
        held = set(self._pages)
        assert not held & set(self._free_rows), "a row is held and free"
        assert len(held) + len(self._free_rows) == self._table.shape[0], "rows leaked"
        num_pages = np.zeros(self._table.shape[0], np.int64)
        in_page = np.arange(self.page_size)
        for req_idx, pages in self._pages.items():
            row, first = self._table[req_idx], self._first[req_idx]
            num_pages[req_idx] = len(pages)
            assert row[first : first + len(pages)].tolist() == pages, f"row {req_idx} is wrong"
            slots = np.array(self._slots[req_idx], np.int32)
            expected = np.array(pages, np.int32)[:, None] * self.page_size + in_page
            assert np.array_equal(slots, expected.ravel()), f"row {req_idx}: slots"
        stray = np.flatnonzero(np.count_nonzero(self._table != SINK_PAGE, axis=1) != num_pages)
        assert not len(stray), f"rows {stray.tolist()} have stray pages"
        assert self._first.keys() == self._slots.keys() == held, "a free row holds something"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU no memory is taken before it is written: to fill a pool takes long."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
