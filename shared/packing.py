"""Pack rows of many requests into the tensors of one forward.

Everything a model computes is the same *extend*: rows of new tokens per request, the committed
prefix in pages, and each row's own path inside the block. A prefill chunk is a chain, plain
decoding a tree of one node, verification a tree of N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.tree_attention import TreeAttentionMetadata
from shared.kv.pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """The rows of one request in one forward.

    Args:
        req_idx: Row of the page table.
        prefix_len: Committed logical slots that every row sees.
        num_rows: Rows of the block.
        first_slot: Logical slot of row 0; row i writes first_slot + i.
        depth: [num_rows] i32, tokens of the block above the row on its own path; None: a chain.
        path: [num_rows, D] i32, offsets from prefix_len of the row's own path, itself last; None: a
            chain, or a path that lies on the device (see `pack_rows`).
        writes_kv: False: the rows' KV is committed already (replay); theirs goes to the sink.
    """

    req_idx: int
    prefix_len: int
    num_rows: int
    first_slot: int
    depth: NDArray[np.int32] | None = None
    path: NDArray[np.int32] | None = None
    writes_kv: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Where the rows of a forward lie.

    Args:
        slot_mapping: [T] i32, slot that each row's KV goes to.
        attention: What each row sees.
        row_indptr: [R + 1] i64 on the host: rows of block r are [row_indptr[r], row_indptr[r + 1]).
    """

    slot_mapping: torch.Tensor
    attention: TreeAttentionMetadata
    row_indptr: NDArray[np.int64]


def to_device(array: NDArray, device: torch.device) -> torch.Tensor:
    """Copy a host array to the device without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def pack_rows(
    blocks: Sequence[RowBlock],
    pool: KVPool,
    *,
    window: int = 0,
    path: torch.Tensor | None = None,
) -> PackedRows:
    """Concatenate blocks into one forward.

    Args:
        window: Sliding window of the model, tokens; 0 = none.
        path: [T, D] i32 on the device, used instead of the blocks' own paths.
    """
    num_rows = np.array([block.num_rows for block in blocks], dtype=np.int64)
    row_indptr = np.concatenate([[0], np.cumsum(num_rows)])
    slots = np.zeros(row_indptr[-1], dtype=np.int32)
    path_len = np.empty(row_indptr[-1], dtype=np.int32)
    width = max([block.path.shape[1] for block in blocks if block.path is not None], default=1)
    offsets = np.zeros((row_indptr[-1] if path is None else 0, width), dtype=np.int32)
    for block, start, stop in zip(blocks, row_indptr[:-1], row_indptr[1:], strict=True):
        steps = np.arange(block.num_rows, dtype=np.int64)
        if block.writes_kv:
            slots[start:stop] = pool.slots(block.req_idx, block.first_slot + steps)
        path_len[start:stop] = (steps if block.depth is None else block.depth) + 1
        if block.path is not None:
            offsets[start:stop, : block.path.shape[1]] = block.path
    device = pool.device
    attention = TreeAttentionMetadata(
        page_table=pool.page_table,
        req_idx=to_device(np.array([b.req_idx for b in blocks], dtype=np.int32), device),
        prefix_len=to_device(np.array([b.prefix_len for b in blocks], dtype=np.int32), device),
        row_indptr=to_device(row_indptr.astype(np.int32), device),
        path_len=to_device(path_len, device),
        path_offset=to_device(offsets, device) if path is None else path,
        is_chain=to_device(np.array([b.depth is None for b in blocks], dtype=np.bool_), device),
        page_size=pool.page_size,
        window=window,
    )
    return PackedRows(
        slot_mapping=to_device(slots, device), attention=attention, row_indptr=row_indptr
    )
