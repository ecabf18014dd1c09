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

# Not 96, 192 or 384: on a GPU these take longer than the power of 2 above them.
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512)


def bucket_of(count: int) -> int | None:
    """Return the smallest bucket that holds `count` rows; None: more than any."""
    place = bisect_left(ROW_BUCKETS, count)
    return ROW_BUCKETS[place] if place < len(ROW_BUCKETS) else None
