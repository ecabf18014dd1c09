"""Which K/V tiles the rows of a step read, worked out on the host once per step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.tree_attention_metadata import TreeAttentionMetadata

# KV indices of one tile; tiles are cut at multiples of it, whatever the batch.
CPU_KV_TILE = 64

# Limits of one slice of rows, so that its temporaries stay in the cache: rows of one request, and
# values of K and of the scores.
_MAX_SEGMENT_ROWS = 64
_MAX_K_VALUES = 1 << 19
_MAX_SCORES = 1 << 19


@dataclass(frozen=True, slots=True)
class SharedTiles:
    """Tiles [tile, tile + num_tiles) that rows [row_begin, row_end) share.

    Their items begin at `item`: all rows of the first tile, then all rows of the second.
    """

    row_begin: int
    row_end: int
    item: int
    tile: int
    num_tiles: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlice:
    """Rows [row_begin, row_end) and their items, one per (row, tile): shared tiles, then own ones.

    Args:
        index: [num_tiles * Hkv * TILE] i64 rows of a cache viewed as [num_slots * Hkv, d].
        own_item: First item whose tile belongs to one row.
        own_tile: First such tile.
        own_row: [num_items - own_item] i64. Row of each.
        own_ranks: (begin, end, rows) of own items counted from own_item: the lowest own tile of
            every row, then the second lowest, and so on.
        masked_item: First item that may hold an invisible KV index.
        mask: [num_items - masked_item, 1, TILE] f32, 0 or -inf.
        item_row: [num_items] i64, relative to row_begin.
        row_items: [num_rows * most tiles] i64. Items of each row by tile, padded with num_items.
    """

    row_begin: int
    row_end: int
    num_items: int
    index: torch.Tensor
    shared: tuple[SharedTiles, ...]
    own_item: int
    own_tile: int
    own_row: torch.Tensor
    own_ranks: tuple[tuple[int, int, slice | torch.Tensor], ...]
    masked_item: int
    mask: torch.Tensor
    item_row: torch.Tensor
    row_items: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAttentionPlan:
    """The slices of a step, and buffers that its layers use one after the other.

    Args:
        k: [most tiles * Hkv * TILE, d] f32.
        v: as k.
        scores: [most items, Hkv, group, TILE] f32.
        products: [most own items, Hkv, group, d] f32.
    """

    slices: tuple[RowSlice, ...]
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor
    products: torch.Tensor


def plan_rows(
    metadata: TreeAttentionMetadata,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
) -> TreeAttentionPlan:
    """Work out what to gather and to multiply for every row of a step.

    Args:
        device: Where the tensors of the plan go.
    """
    step = _Step(metadata)
    max_tiles = max(1, _MAX_K_VALUES // (num_kv_heads * CPU_KV_TILE * head_dim))
    max_items = max(1, _MAX_SCORES // (num_heads * CPU_KV_TILE))
    slices = tuple(
        _plan_slice(step, segments, num_kv_heads, device)
        for segments in _cut(step, max_tiles, max_items)
    )
    group = num_heads // num_kv_heads
    most_rows = max((len(rows.index) for rows in slices), default=0)
    most_items = max((rows.num_items for rows in slices), default=0)
    most_own = max((rows.num_items - rows.own_item for rows in slices), default=0)
    return TreeAttentionPlan(
        slices=slices,
        k=torch.empty((most_rows, head_dim), device=device),
        v=torch.empty((most_rows, head_dim), device=device),
        scores=torch.empty((most_items, num_kv_heads, group, CPU_KV_TILE), device=device),
        products=torch.empty((most_own, num_kv_heads, group, head_dim), device=device),
    )


class _Step:
    """The metadata on the host and what follows from it for every live row, [num_live] each."""

    def __init__(self, metadata: TreeAttentionMetadata) -> None:
        self.page_table = metadata.page_table.cpu().numpy()
        self.page_size = metadata.page_size
        self.path_offset = metadata.path_offset.cpu().numpy()
        self.row_indptr = metadata.row_indptr.cpu().numpy()
        request = np.repeat(np.arange(len(self.row_indptr) - 1), np.diff(self.row_indptr))
        self.req_idx = metadata.req_idx.cpu().numpy()[request]
        self.is_chain = metadata.is_chain.cpu().numpy()[request]
        self.prefix = metadata.prefix_len.cpu().numpy()[request].astype(np.int64)
        path_len = metadata.path_len.cpu().numpy()[: len(request)]
        # A row sees KV indices [start, end).
        self.end = self.prefix + path_len
        self.start = np.zeros_like(self.end)
        if metadata.window:
            self.start = np.maximum(self.end - metadata.window, 0)
        self.start_tile = self.start // CPU_KV_TILE
        self.end_tile = -(-self.end // CPU_KV_TILE)
        # Logical slot of the row itself. What a row may not see is read from there instead: that
        # is finite, and gets a weight of exactly 0.
        self.own_logical = self.end - 1
        rows = np.flatnonzero(~self.is_chain)
        self.own_logical[rows] = self.prefix[rows] + self.path_offset[rows, path_len[rows] - 1]

    def slots(self, req_idx: NDArray, logical: NDArray) -> NDArray:
        """Return slots of logical slots; the arguments broadcast."""
        pages = self.page_table[req_idx, logical // self.page_size].astype(np.int64)
        return pages * self.page_size + logical % self.page_size

    def mask(self, rows: NDArray, index: NDArray) -> NDArray:
        """Return what to add to the scores of rows [n] at KV indices [n or 1, TILE]."""
        is_visible = (index < self.end[rows, None]) & (index >= self.start[rows, None])
        return np.where(is_visible, np.float32(0), np.float32(-np.inf))


@dataclass(frozen=True, slots=True)
class _Segment:
    """Rows [begin, end) of one request, and the tiles [first, last) that they share."""

    begin: int
    end: int
    first: int
    last: int


def _cut(step: _Step, max_tiles: int, max_items: int) -> Iterator[list[_Segment]]:
    """Yield the segments of one slice after another."""
    segments: list[_Segment] = []
    num_tiles = num_items = 0
    for request_begin, request_end in itertools.pairwise(step.row_indptr.tolist()):
        for begin in range(request_begin, request_end, _MAX_SEGMENT_ROWS):
            segment = _segment(step, begin, min(begin + _MAX_SEGMENT_ROWS, request_end))
            rows = slice(segment.begin, segment.end)
            own_first = np.maximum(step.start_tile[rows], segment.last)
            num_own = int(np.maximum(step.end_tile[rows] - own_first, 0).sum())
            num_shared = segment.last - segment.first
            tiles = num_shared + num_own
            items = num_shared * (segment.end - segment.begin) + num_own
            if segments and (num_tiles + tiles > max_tiles or num_items + items > max_items):
                yield segments
                segments, num_tiles, num_items = [], 0, 0
            segments.append(segment)
            num_tiles += tiles
            num_items += items
    if segments:
        yield segments


def _segment(step: _Step, begin: int, end: int) -> _Segment:
    first = int(step.start_tile[begin:end].min())
    if end - begin == 1:
        return _Segment(begin, end, first, first)
    if step.is_chain[begin]:
        return _Segment(begin, end, first, int(step.end_tile[begin:end].max()))
    return _Segment(begin, end, first, max(first, int(step.prefix[begin]) // CPU_KV_TILE))


def _plan_slice(
    step: _Step, segments: list[_Segment], num_kv_heads: int, device: torch.device
) -> RowSlice:
    row_begin, row_end = segments[0].begin, segments[-1].end
    slots: list[NDArray] = []  # [tiles, TILE] each
    item_rows: list[NDArray] = []
    masks: list[NDArray] = []
    shared: list[SharedTiles] = []
    masked_item: int | None = None
    num_items = num_tiles = 0
    own_first = step.start_tile[row_begin:row_end].copy()
    for segment in segments:
        num_shared = segment.last - segment.first
        if num_shared == 0:
            continue
        rows = np.arange(segment.begin, segment.end)
        own_first[rows - row_begin] = np.maximum(own_first[rows - row_begin], segment.last)
        slots.append(_shared_slots(step, segment))
        shared.append(SharedTiles(segment.begin, segment.end, num_items, num_tiles, num_shared))
        seen_by_all = (int(step.start[rows].max()), int(step.end[rows].min()))
        for tile in range(segment.first, segment.last):
            index = tile * CPU_KV_TILE + np.arange(CPU_KV_TILE)
            is_masked = index[0] < seen_by_all[0] or index[-1] >= seen_by_all[1]
            if is_masked and masked_item is None:
                masked_item = num_items
            if masked_item is not None:
                masks.append(step.mask(rows, index[None]))
            num_items += len(rows)
        item_rows.append(np.tile(rows, num_shared))
        num_tiles += num_shared

    rows = np.arange(row_begin, row_end)
    num_own = np.maximum(step.end_tile[rows] - own_first, 0)
    has_rank = np.arange(num_own.max())[:, None] < num_own  # [ranks, rows]
    rank, own = np.nonzero(has_rank)
    own_row = own + row_begin
    index = ((own_first[own] + rank) * CPU_KV_TILE)[:, None] + np.arange(CPU_KV_TILE)
    own_mask = step.mask(own_row, index)
    slots.append(_own_slots(step, own_row, index, own_mask == 0))
    masks.append(own_mask)
    item_rows.append(own_row)

    row_of_item = np.concatenate(item_rows) - row_begin
    counts = np.bincount(row_of_item, minlength=len(rows))
    by_row = np.argsort(row_of_item, kind="stable")
    row_items = np.full((len(rows), counts.max()), len(row_of_item))
    row_items[np.arange(counts.max()) < counts[:, None]] = by_row

    # [tiles, Hkv, TILE]
    index = np.concatenate(slots)[:, None] * num_kv_heads + np.arange(num_kv_heads)[:, None]
    return RowSlice(
        row_begin=row_begin,
        row_end=row_end,
        num_items=len(row_of_item),
        index=torch.from_numpy(index.reshape(-1)).to(device),
        shared=tuple(shared),
        own_item=num_items,
        own_tile=num_tiles,
        own_row=torch.from_numpy(own_row).to(device),
        own_ranks=tuple(_ranks(has_rank, row_begin, device)),
        masked_item=num_items if masked_item is None else masked_item,
        mask=torch.from_numpy(np.concatenate(masks)[:, None]).to(device),
        item_row=torch.from_numpy(row_of_item).to(device),
        row_items=torch.from_numpy(row_items.reshape(-1)).to(device),
    )


def _shared_slots(step: _Step, segment: _Segment) -> NDArray:
    """Return the slots of the tiles that a segment shares. [tiles, TILE]."""
    rows = slice(segment.begin, segment.end)
    longest = segment.begin + int(step.end[rows].argmax())
    logical = np.arange(segment.first * CPU_KV_TILE, segment.last * CPU_KV_TILE)
    is_seen = (logical >= step.start[rows].min()) & (logical < step.end[longest])
    logical = np.where(is_seen, logical, step.own_logical[longest])
    return step.slots(step.req_idx[longest], logical).reshape(-1, CPU_KV_TILE)


def _own_slots(step: _Step, rows: NDArray, index: NDArray, is_visible: NDArray) -> NDArray:
    """Return the slots of KV indices along the rows' own paths.

    Args:
        rows: [n].
        index: [n, TILE].
        is_visible: [n, TILE].
    """
    logical = index
    path_index = index - step.prefix[rows, None]
    is_path = is_visible & (path_index >= 0) & ~step.is_chain[rows, None]
    item, lane = np.nonzero(is_path)
    if len(item):
        row = rows[item]
        logical = logical.copy()
        logical[item, lane] = step.prefix[row] + step.path_offset[row, path_index[item, lane]]
    logical = np.where(is_visible, logical, step.own_logical[rows, None])
    return step.slots(step.req_idx[rows, None], logical)


def _ranks(
    has_rank: NDArray, row_begin: int, device: torch.device
) -> Iterator[tuple[int, int, slice | torch.Tensor]]:
    """Yield the items and the rows of every rank; a run of rows is a slice."""
    begin = 0
    for is_member in has_rank:
        rows = np.flatnonzero(is_member) + row_begin
        end = begin + len(rows)
        if rows[-1] - rows[0] + 1 == len(rows):
            yield begin, end, slice(int(rows[0]), int(rows[-1]) + 1)
        else:
            yield begin, end, torch.from_numpy(rows).to(device)
        begin = end
