"""Stage what an extend reads: rows of committed tokens with their true features.

Where graphs are captured, the rows are padded up to a bucket, as shared/step/buckets.py says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from draft_service.features import FeatureRows
from draft_service.phases import DraftExtendInput
from draft_service.request import DraftRequest
from shared.kv.pool import KVPool
from shared.step.packing import RowBlocks, pack_rows, padded_blocks
from shared.step.staging import Arrays, Fields, Staging


class ExtendWork(NamedTuple):
    """The next `num_rows` rows of a request, at KV index `kv_len`."""

    request: DraftRequest
    kv_len: int
    num_rows: int


class ExtendPacker:
    """Stages the inputs of extends.

    Args:
        window: Tokens that a row attends to; 0 = everything.
        staging: Of nothing else.
    """

    def __init__(self, pool: KVPool, staging: Staging, *, window: int) -> None:
        self._pool = pool
        self.staging = staging
        self._window = window

    def pack(self, works: Sequence[ExtendWork], bucket: int | None) -> DraftExtendInput:
        """Stage the next rows of several requests; takes their features.

        Args:
            bucket: What the rows are padded to; None: they are not padded.
        """
        token_ids: list[int] = []
        position_ids: list[int] = []
        last_rows: list[int] = []
        features: list[FeatureRows] = []
        for request, kv_len, count in works:
            position = request.base + kv_len
            shifted = position + request.input_shift
            token_ids += request.tokens[shifted : shifted + count]
            position_ids += range(position, position + count)
            last_rows.append(len(token_ids) - 1)
            if request.features is not None:
                features += request.features.take(count)
        blocks = RowBlocks(
            req_idx=[work.request.req_idx for work in works],
            prefix_len=[work.kv_len for work in works],
            num_rows=[work.num_rows for work in works],
        )
        num_live = len(token_ids)
        host, fields = self.begin(blocks, position_ids, num_live, bucket)
        host["token_ids"][:num_live] = token_ids
        host["last_rows"][: len(works)] = last_rows
        staged = stage_features(features, self.staging, bucket or num_live)
        self.staging.flush()
        return DraftExtendInput(**fields, features=staged)

    def begin(
        self,
        blocks: RowBlocks,
        position_ids: Sequence[int] | NDArray[Any],
        num_live: int,
        bucket: int | None,
    ) -> tuple[Arrays, dict[str, Any]]:
        """Begin to stage an extend: where its rows lie.

        Args:
            num_live: Rows, padding excluded.
        Returns: Arrays to fill, of which `token_ids` and `last_rows` are 0; and all fields of a
            DraftExtendInput but the features.
        """
        staging, num_reqs = self.staging, len(blocks.req_idx)
        staging.begin()
        num_places = num_reqs if bucket is None else padded_blocks(bucket, self._pool)
        host, device = staging.place_zeros(_extend_fields, bucket or num_live, num_places)
        rows = pack_rows(blocks, self._pool, window=self._window, staging=staging, num_rows=bucket)
        host["position_ids"][:num_live] = position_ids
        host["hidden_idx"][:num_reqs] = blocks.req_idx
        host["hidden_idx"][num_reqs:] = self._pool.max_num_requests
        return host, {**device, "rows": rows, "bucket": bucket}


def parts_of(works: Sequence[ExtendWork], max_rows: int) -> list[list[ExtendWork]]:
    """Cut works into parts of at most so many rows each, in order; the last one may be empty."""
    parts: list[list[ExtendWork]] = [[]]
    num_rows = 0
    for work in works:
        num_rows += work.num_rows
        if num_rows > max_rows and parts[-1]:
            parts.append([])
            num_rows = work.num_rows
        parts[-1].append(work)
    return parts


def stage_features(
    parts: Sequence[FeatureRows], staging: Staging, num_rows: int
) -> torch.Tensor | None:
    """Return [num_rows, width] in the features' own dtype: the device converts them."""
    if not parts:
        return None
    if len({part.dtype for part in parts}) > 1:  # of targets that differ
        parts = [FeatureRows.of(torch.cat([part.tensor for part in parts]))]
    dtype = parts[0].dtype
    host, device = staging.place(features=(dtype, (num_rows, parts[0].data.shape[1])))
    array, row = host["features"], 0
    for rows in joined(parts):
        stop = row + len(rows)
        array[row:stop] = rows
        row = stop
    array[row:] = 0
    return device["features"]


def joined(parts: Sequence[FeatureRows]) -> Iterator[NDArray[Any]]:
    """Yield the rows of all parts; those of one array that follow each other, at once."""
    _, data, first, stop = parts[0]
    for part in parts[1:]:
        if part.data is not data or part.first != stop:
            yield data[first:stop]
            data, first = part.data, part.first
        stop = part.stop
    yield data[first:stop]


def _extend_fields(num_rows: int, num_reqs: int) -> Fields:
    return {
        "token_ids": (torch.int64, (num_rows,)),
        "position_ids": (torch.int64, (num_rows,)),
        "last_rows": (torch.int64, (num_reqs,)),
        "hidden_idx": (torch.int64, (num_reqs,)),
    }
