"""Which K/V tiles the rows of a step read, worked out on the host once per step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.page_slots import slots_in
from shared.kernels.products_cpu import BATCH_ITEMS
from shared.kernels.tree_attention_metadata import TreeAttentionMetadata

# KV indices of one tile; tiles are cut at multiples of it, whatever the batch.
CPU_KV_TILE = 64

# Limits of one slice of rows, so that its temporaries stay in the cache: rows, values of K that
# belong to single rows, scores.
_MAX_ROWS = 64
_MAX_OWN_VALUES = 1 << 20
_MAX_SCORES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlice:
    """Rows with equally many tiles each: first those that all of them share, then their own.

    Args:
        where: Its rows of the step.
        num_rows: How many.
        num_padded: At least a whole batch of products where tiles are shared; what is more than
            num_rows repeats the last row.
        num_shared: Tiles that all rows share.
        num_own: Tiles that each row has for itself, after the shared ones.
        index: [(num_shared + num_own * num_padded) * Hkv * TILE] i64 rows of a cache viewed as
            [num_slots * Hkv, d]; shared tiles lie as [num_shared, Hkv], own tiles as
            [num_own, Hkv, num_padded]. What a row may not see is replaced by something that it
            does see: finite, and given a weight of exactly 0.
        masked_tile: First tile, shared or own, with a KV index that some row may not see.
        mask: [num_shared + num_own - masked_tile, 1, num_padded, 1, TILE] f32, 0 or -inf.
    """

    where: slice | torch.Tensor
    num_rows: int
    num_padded: int
    num_shared: int
    num_own: int
    index: torch.Tensor
    masked_tile: int
    mask: torch.Tensor


def plan_rows(
    metadata: TreeAttentionMetadata,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
) -> tuple[RowSlice, ...]:
    """Work out what to gather and to multiply for every row of a step.

    Args:
        device: Where the tensors of the slices go.
    """
    step = _Step(metadata, num_kv_heads, device)
    most_own_tiles = max(1, _MAX_OWN_VALUES // (num_kv_heads * CPU_KV_TILE * head_dim))
    most_items = max(1, _MAX_SCORES // (num_heads * CPU_KV_TILE))
    slices: list[RowSlice] = []
    singles: list[int] = []
    for request, (request_begin, request_end) in enumerate(itertools.pairwise(step.row_indptr)):
        if request_end - request_begin == 1:
            singles.append(request)
            continue
        begin = request_begin
        while begin < request_end:
            end = min(begin + _MAX_ROWS, request_end)
            first, shared_end, last = step.tiles(request, begin, end)
            most_rows = min(
                most_items // (last - first), most_own_tiles // max(1, last - shared_end)
            )
            end = min(end, begin + max(1, most_rows))
            slices.append(_plan_segment(step, request, begin, end))
            begin = end
    for requests in _buckets(step, singles, min(most_own_tiles, most_items)):
        slices.append(_plan_singles(step, requests))
    return tuple(slices)


class _Step:
    """The metadata on the host."""

    def __init__(
        self, metadata: TreeAttentionMetadata, num_kv_heads: int, device: torch.device
    ) -> None:
        self.page_table = metadata.page_table.cpu().numpy()
        self.page_size = metadata.page_size
        self.window = metadata.window
        self.path_len = metadata.path_len.cpu().numpy().astype(np.int64)
        self.path_offset = metadata.path_offset.cpu().numpy()
        self.row_indptr: list[int] = metadata.row_indptr.tolist()
        self.req_idx: NDArray = metadata.req_idx.cpu().numpy()
        self.prefix: list[int] = metadata.prefix_len.tolist()
        self.is_chain: list[bool] = metadata.is_chain.tolist()
        self._num_kv_heads = num_kv_heads
        self.device = device

    def start(self, end: int) -> int:
        """Return the first KV index that a row with KV indices up to `end` sees."""
        return max(0, end - self.window) if self.window else 0

    def tiles(self, request: int, begin: int, end: int) -> tuple[int, int, int]:
        """Return the first tile of rows of a request, the end of the shared ones, the end."""
        path_len = self.path_len[begin:end]
        prefix = self.prefix[request]
        first = self.start(prefix + int(path_len.min())) // CPU_KV_TILE
        last = -(-(prefix + int(path_len.max())) // CPU_KV_TILE)
        if self.is_chain[request]:
            return first, last, last
        return first, max(first, prefix // CPU_KV_TILE), last

    def slots(self, request: int | NDArray, logical: NDArray) -> NDArray:
        """Return the slots of logical slots; `request` is one for all, or broadcasts to them."""
        return slots_in(self.page_table, self.req_idx[request], logical, self.page_size)

    def cache_rows(self, slots: NDArray, num_rows: int) -> NDArray:
        """Return where the slots of tiles lie in a cache, head by head.

        Args:
            slots: [tiles, num_rows, TILE], flat.
        Returns: [tiles * Hkv * num_rows * TILE] i64.
        """
        if self._num_kv_heads > 1:
            tiles = slots.reshape(-1, 1, num_rows, CPU_KV_TILE) * self._num_kv_heads
            slots = (tiles + np.arange(self._num_kv_heads)[:, None, None]).reshape(-1)
        return slots

    def mask(self, is_visible: NDArray) -> torch.Tensor:
        """Return [tiles, 1, n, 1, TILE] to be added to scores, from [n, tiles * TILE]."""
        mask = np.where(is_visible, np.float32(0), np.float32(-np.inf))
        mask = mask.reshape(len(mask), -1, 1, 1, CPU_KV_TILE).transpose(1, 2, 0, 3, 4)
        return torch.from_numpy(mask).to(self.device)


def _plan_segment(step: _Step, request: int, begin: int, end: int) -> RowSlice:
    """Plan rows [begin, end) of one request."""
    first, shared_end, last = step.tiles(request, begin, end)
    num_shared = shared_end - first
    num_padded = max(end - begin, BATCH_ITEMS) if num_shared else end - begin
    rows = np.minimum(np.arange(begin, begin + num_padded), end - 1)
    prefix = step.prefix[request]
    row_end = prefix + step.path_len[rows]  # [n], a row sees KV indices [start, end)
    least_end, most_end = int(row_end.min()), int(row_end.max())
    index = np.arange(first * CPU_KV_TILE, last * CPU_KV_TILE)

    masked_tile = min(num_shared, least_end // CPU_KV_TILE - first)
    row_start = np.maximum(row_end - step.window, 0) if step.window else np.zeros_like(row_end)
    if row_start.max() > index[0]:
        masked_tile = 0
    masked_index = index[masked_tile * CPU_KV_TILE :]
    seen = np.clip(masked_index, row_start[:, None], row_end[:, None] - 1)  # [n, masked]

    logical = index[: num_shared * CPU_KV_TILE]
    if step.is_chain[request] or step.window:
        logical = np.clip(logical, step.start(least_end), most_end - 1)
    where = step.cache_rows(step.slots(request, logical), 1)
    if last > shared_end:
        own = seen[:, (num_shared - masked_tile) * CPU_KV_TILE :]
        path = own - prefix
        offset = step.path_offset[rows[:, None], np.maximum(path, 0)]
        own = np.where(path < 0, own, prefix + offset)
        own = own.reshape(num_padded, -1, CPU_KV_TILE).swapaxes(0, 1).reshape(-1)
        own_where = step.cache_rows(step.slots(request, own), num_padded)
        where = np.concatenate((where, own_where))
    return RowSlice(
        where=slice(begin, end),
        num_rows=end - begin,
        num_padded=num_padded,
        num_shared=num_shared,
        num_own=last - shared_end,
        index=torch.from_numpy(where).to(step.device),
        masked_tile=masked_tile,
        mask=step.mask(seen == masked_index),
    )


def _buckets(step: _Step, singles: Sequence[int], most_tiles: int) -> Iterator[list[int]]:
    """Yield requests of one row each, about equally many tiles long."""
    num_tiles = {}
    for request in singles:
        row = step.row_indptr[request]
        first, _, last = step.tiles(request, row, row + 1)
        num_tiles[request] = last - first
    bucket: list[int] = []
    for request in sorted(singles, key=num_tiles.__getitem__):
        tiles = num_tiles[request]
        is_longer = bucket and 3 * tiles > 4 * num_tiles[bucket[0]] + 3
        if bucket and (is_longer or tiles * (len(bucket) + 1) > most_tiles):
            yield bucket
            bucket = []
        bucket.append(request)
    if bucket:
        yield bucket


def _plan_singles(step: _Step, requests: Sequence[int]) -> RowSlice:
    """Plan requests of one row each; shorter ones get tiles of which they see nothing."""
    rows = np.array([step.row_indptr[request] for request in requests])
    prefix = np.array([step.prefix[request] for request in requests])[:, None]
    row_end = prefix + step.path_len[rows, None]  # [n, 1]
    row_start = np.maximum(row_end - step.window, 0) if step.window else np.zeros_like(row_end)
    first = row_start // CPU_KV_TILE
    num_tiles = int((-(-row_end // CPU_KV_TILE) - first).max())
    index = first * CPU_KV_TILE + np.arange(num_tiles * CPU_KV_TILE)  # [n, tiles * TILE]

    seen = np.clip(index, row_start, row_end - 1)
    logical = seen
    is_tree = np.array([not step.is_chain[request] for request in requests])[:, None]
    if is_tree.any():
        path = seen - prefix
        is_path = is_tree & (path >= 0)
        offset = step.path_offset[rows[:, None], np.where(is_path, path, 0)]
        logical = np.where(is_path, prefix + offset, seen)
    slots = step.slots(np.array(requests)[:, None], logical)
    slots = slots.reshape(len(rows), -1, CPU_KV_TILE).swapaxes(0, 1).reshape(-1)
    masked_tile = 0 if step.window else int(row_end.min()) // CPU_KV_TILE
    masked = slice(masked_tile * CPU_KV_TILE, None)
    is_run = bool((np.diff(rows) == 1).all())
    return RowSlice(
        where=slice(int(rows[0]), int(rows[-1]) + 1)
        if is_run
        else torch.from_numpy(rows).to(step.device),
        num_rows=len(rows),
        num_padded=len(rows),
        num_shared=0,
        num_own=num_tiles,
        index=torch.from_numpy(step.cache_rows(slots, len(rows))).to(step.device),
        masked_tile=masked_tile,
        mask=step.mask(seen[:, masked] == index[:, masked]),
    )
