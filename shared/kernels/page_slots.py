"""Where logical slots lie: the page-to-slot formula, for kernels and for arrays.

slot = page_table[req_idx, logical // page_size] * page_size + logical % page_size
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def slots_of(pages_ptr, logical, PAGE_SIZE: tl.constexpr, is_wanted=None):
    """Return the slots of logical slots of one request; device function.

    Args:
        pages_ptr: Its row of the page table.  # [max_pages_per_req] i32
        is_wanted: False: the page table is not read, and what is returned is undefined.
    """
    page = tl.load(pages_ptr + logical // PAGE_SIZE, mask=is_wanted)
    return page * PAGE_SIZE + logical % PAGE_SIZE


def slots_in(page_table: Any, req_idx: Any, logical: Any, page_size: int) -> Any:
    """Return the slots of logical slots, like `slots_of`.

    Args:
        page_table: [max_reqs, max_pages_per_req], numpy or torch.
        req_idx: Row of the page table, for each of `logical` or for all.
        logical: Of numpy or torch, as the page table.
    """
    return page_table[req_idx, logical // page_size] * page_size + logical % page_size
