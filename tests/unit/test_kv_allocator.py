"""The page allocator: every page is free or owned exactly once, whatever happens."""

from __future__ import annotations

import random

import pytest

from shared.kv.allocator import SINK_PAGE, OutOfPagesError, PageAllocator, PageId


def test_100k_random_operations_on_a_tiny_pool() -> None:
    rng = random.Random(0)
    allocator = PageAllocator(12)
    owned: list[list[PageId]] = []
    num_refused = num_full = 0
    for _ in range(100_000):
        if rng.random() < 0.5:
            count = rng.randrange(0, 6)
            num_free = allocator.num_free
            try:
                pages = allocator.alloc(count)
            except OutOfPagesError:
                num_refused += 1
                assert count > num_free and allocator.num_free == num_free
            else:
                assert len(pages) == len(set(pages)) == count <= num_free
                assert SINK_PAGE not in pages
                owned.append(pages)
        elif owned:
            allocator.free(owned.pop(rng.randrange(len(owned))))
        assert allocator.num_free == 11 - sum(map(len, owned))
        num_full += allocator.num_free == 0
        allocator.check_integrity(owned)
    assert num_refused > 1000 and num_full > 1000, "the pool never ran out: nothing was tested"


def test_every_page_but_the_sink_can_be_had() -> None:
    allocator = PageAllocator(5)
    assert sorted(allocator.alloc(4)) == [1, 2, 3, 4]
    with pytest.raises(OutOfPagesError, match="1 KV pages wanted, 0 of 4 are free"):
        allocator.alloc(1)


def test_a_pool_needs_a_page_besides_the_sink() -> None:
    with pytest.raises(ValueError, match="num_pages is 1"):
        PageAllocator(1)


@pytest.mark.parametrize("page", [SINK_PAGE, PageId(5), PageId(-1)])
def test_freeing_a_page_that_cannot_be_out_is_our_bug(page: PageId) -> None:
    with pytest.raises(AssertionError, match="is not in 1..4"):
        PageAllocator(5).free([page])


def test_freeing_twice_is_our_bug() -> None:
    allocator = PageAllocator(5)
    pages = allocator.alloc(2)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages[:1])


def test_integrity_notices_leaks_and_double_owners() -> None:
    allocator = PageAllocator(5)
    first, second = allocator.alloc(2), allocator.alloc(1)
    allocator.check_integrity([first, second])
    with pytest.raises(AssertionError, match="leaked"):
        allocator.check_integrity([first])
    with pytest.raises(AssertionError, match="owned twice"):
        allocator.check_integrity([first, second, second])
    allocator.free(second)
    with pytest.raises(AssertionError, match="owned and free"):
        allocator.check_integrity([first, second])
