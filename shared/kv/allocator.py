"""Page allocator: who owns which KV page. Host only, no tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

from shared.errors import CoppiceError, StatusCode

PageId = NewType("PageId", int)

SINK_PAGE = PageId(0)


class OutOfPagesError(CoppiceError):
    """The pool has fewer free pages than asked for; nothing was allocated."""

    code = StatusCode.RESOURCE_EXHAUSTED
    default_reason = "KV_POOL_EXHAUSTED"


class PageAllocator:
    """Hand out page ids 1..num_pages-1; page 0 is the sink of padded rows, never allocated."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(
                f"num_pages is {num_pages}: a pool needs the sink and at least one page"
            )
        self.num_pages = num_pages
        self._free = [PageId(page) for page in range(num_pages - 1, 0, -1)]
        self._is_free = bytearray([0] + [1] * (num_pages - 1))

    @property
    def num_free(self) -> int:
        """Return how many pages can still be allocated."""
        return len(self._free)

    def alloc(self, count: int) -> list[PageId]:
        """Take `count` pages.

        Raises: OutOfPagesError, with nothing taken, if fewer are free.
        """
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} KV pages wanted, {len(self._free)} of {self.num_pages - 1} are free"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[PageId]) -> None:
        """Give pages back; giving back a page that is not out is our bug."""
        for page in pages:
            assert 0 < page < self.num_pages, f"page {page} is not in 1..{self.num_pages - 1}"
            assert not self._is_free[page], f"page {page} is freed twice"
            self._is_free[page] = 1
            self._free.append(page)

    def check_integrity(self, owned: Iterable[Iterable[PageId]]) -> None:
        """Raise unless every page is either free or owned exactly once.

        Args:
            owned: The pages of each owner.
        """
        seen = set(self._free)
        assert len(seen) == len(self._free), "a page is in the free list twice"
        for pages in owned:
            for page in pages:
                assert page not in seen, f"page {page} is owned twice, or owned and free"
                seen.add(page)
        assert seen == set(range(1, self.num_pages)), (
            f"pages leaked: {sorted(set(range(1, self.num_pages)) - seen)[:8]}"
        )
