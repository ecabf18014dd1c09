"""Row counts that captured graphs are made for, and what pads a step up to one of them.

field          padding                 why it is harmless
-----          -------                 ------------------
token_ids      0                       some token
position_ids   0                       some angle
slot_mapping   0                       K/V go to the sink page, which nobody reads
path_len       1                       read by no program: the row belongs to no request
path_offset    0                       as path_len
row_indptr     its last value          a padded request has no rows
req_idx        0                       as row_indptr
prefix_len     0                       as row_indptr
is_chain       true                    as row_indptr
features       0                       finite (a draft's extend)

Attention gives padded rows 0, and whoever reads the result asks for the rows that are there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

ROW_BUCKETS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792,
    2048, 3072, 4096,
)  # fmt: skip
# Requests that a draft grows trees for at once.
BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


# Weights in 8 or 4 bits have no tiles for so many rows: a step would take longer than with 256.
_ONLY_OF_WHOLE_WEIGHTS = 192


def buckets_up_to(most: int, buckets: Sequence[int] = ROW_BUCKETS) -> tuple[int, ...]:
    """Return the buckets of an engine whose steps have at most so many rows, the last one."""
    return (*(bucket for bucket in buckets if bucket < most), most)


def row_buckets_up_to(most: int, *, is_quantized: bool) -> tuple[int, ...]:
    """Return the row buckets of an engine whose steps have at most so many rows, the last one.

    Args:
        is_quantized: The model's weights are.
    """
    buckets = [b for b in ROW_BUCKETS if not (is_quantized and b == _ONLY_OF_WHOLE_WEIGHTS)]
    return buckets_up_to(most, buckets)


def bucket_of(count: int, buckets: Sequence[int] = ROW_BUCKETS) -> int | None:
    """Return the smallest of the buckets that holds `count`; None: more than any."""
    place = bisect_left(buckets, count)
    return buckets[place] if place < len(buckets) else None
