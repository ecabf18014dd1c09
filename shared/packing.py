"""Pack rows of many requests into the tensors of one forward.

Everything a model computes is the same *extend*: rows of new tokens per request, the committed
prefix in pages, and each row's own path inside the block. A prefill chunk is a chain, plain
decoding a tree of one node, verification a tree of N.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.tree_attention import TreeAttentionMetadata
from shared.kv.pool import KVPool
from shared.staging import Staging
from shared.types import MAX_TREE_NODES


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlocks:
    """The rows of R requests in one forward, a block each, one after the other.

    Args:
        req_idx: [R] i64, rows of the page table.
        prefix_len: [R] i64, committed logical slots that every row of the block sees; row i writes
            slot prefix_len + i.
        num_rows: [R] i64.
        depth: [n] i32, tokens of the block above the row on its own path, of the first n rows of
            the forward; whole blocks, the others are chains. None: all are.
        path: [n, D] i32, offsets from prefix_len of the row's own path, itself last.
        writes_kv: [R] bool; False: the rows' KV is committed already (replay), and theirs goes to
            the sink. None: all do.
    """

    req_idx: NDArray[np.int64]
    prefix_len: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    depth: NDArray[np.int32] | None = None
    path: NDArray[np.int32] | None = None
    writes_kv: NDArray[np.bool_] | None = None


NO_BLOCKS = RowBlocks(
    req_idx=np.zeros(0, dtype=np.int64),
    prefix_len=np.zeros(0, dtype=np.int64),
    num_rows=np.zeros(0, dtype=np.int64),
)


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

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return everything on the device that a forward reads of this."""
        seen = self.attention
        return (
            self.slot_mapping,
            seen.page_table,
            seen.req_idx,
            seen.prefix_len,
            seen.row_indptr,
            seen.path_len,
            seen.path_offset,
            seen.is_chain,
        )


def to_device(array: NDArray, device: torch.device) -> torch.Tensor:
    """Copy a host array to the device without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def pack_rows(
    blocks: RowBlocks,
    pool: KVPool,
    *,
    staging: Staging,
    window: int = 0,
    num_rows: int | None = None,
) -> PackedRows:
    """Lay the blocks of one forward out.

    Args:
        staging: What brings it all to the device at its next flush.
        window: Sliding window of the model, tokens; 0 = none.
        num_rows: Rows and requests to pad to (see buckets.py), so that all shapes depend on this
            number alone; None: no padding.
    """
    count = len(blocks.req_idx)
    row_indptr = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(blocks.num_rows, out=row_indptr[1:])
    used = int(row_indptr[-1])
    total, num_reqs = (used, count) if num_rows is None else (num_rows, num_rows)
    assert used <= total, f"{used} rows do not fit {total}"
    width = MAX_TREE_NODES
    if num_rows is None:
        width = 1 if blocks.path is None else blocks.path.shape[1]
    host, device = staging.place(
        slot_mapping=(torch.int32, (total,)),
        req_idx=(torch.int32, (num_reqs,)),
        prefix_len=(torch.int32, (num_reqs,)),
        row_indptr=(torch.int32, (num_reqs + 1,)),
        path_len=(torch.int32, (total,)),
        path_offset=(torch.int32, (total, width)),
        is_chain=(torch.bool, (num_reqs,)),
    )
    block = np.repeat(np.arange(count), blocks.num_rows)  # of each row
    step = np.arange(used) - row_indptr[block]
    slots = host["slot_mapping"]
    slots[used:] = 0
    if blocks.writes_kv is None or blocks.writes_kv.all():
        slots[:used] = pool.slots(blocks.req_idx[block], blocks.prefix_len[block] + step)
    else:
        slots[:used] = 0
        at = np.flatnonzero(blocks.writes_kv[block])
        slots[at] = pool.slots(blocks.req_idx[block[at]], (blocks.prefix_len[block] + step)[at])
    for name, values in (("req_idx", blocks.req_idx), ("prefix_len", blocks.prefix_len)):
        host[name][:count] = values
        host[name][count:] = 0
    host["row_indptr"][: count + 1] = row_indptr
    host["row_indptr"][count + 1 :] = used
    host["path_len"][:used] = step + 1
    host["path_len"][used:] = 1
    host["is_chain"][:] = True
    has_trees = False
    if blocks.depth is None or blocks.path is None:
        host["path_offset"][:] = 0
    else:
        end, depth = blocks.path.shape
        host["path_len"][:end] = blocks.depth + 1
        host["path_offset"][:, depth:] = 0
        host["path_offset"][end:, :depth] = 0
        host["path_offset"][:end, :depth] = blocks.path
        is_bushy = np.bincount(block[:end], weights=blocks.depth != step[:end], minlength=count) > 0
        host["is_chain"][:count] = ~is_bushy
        has_trees = bool(is_bushy.any())
    attention = TreeAttentionMetadata(
        page_table=pool.stage_page_table(staging),
        req_idx=device["req_idx"],
        prefix_len=device["prefix_len"],
        row_indptr=device["row_indptr"],
        path_len=device["path_len"],
        path_offset=device["path_offset"],
        is_chain=device["is_chain"],
        page_size=pool.page_size,
        window=window,
        # A captured step must serve trees, whatever it was captured with.
        has_trees=num_rows is not None or has_trees,
    )
    return PackedRows(
        slot_mapping=device["slot_mapping"], attention=attention, row_indptr=row_indptr
    )
