"""Pack rows of many requests into the tensors of one forward.

Everything a model computes is the same *extend*: rows of new tokens per request, the committed
prefix in pages, and each row's own path inside the block. A prefill chunk is a chain, plain
decoding a tree of one node, verification a tree of N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.tree_attention import TreeAttentionMetadata
from shared.kv.pool import KVPool
from shared.staging import Staging
from shared.types import MAX_TREE_NODES


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
            chain.
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
    blocks: Sequence[RowBlock],
    pool: KVPool,
    *,
    window: int = 0,
    staging: Staging | None = None,
    num_rows: int | None = None,
) -> PackedRows:
    """Concatenate blocks into one forward.

    Args:
        window: Sliding window of the model, tokens; 0 = none.
        staging: What brings the arrays to the device at its next flush; None: they go at once.
        num_rows: Rows and requests to pad to (see buckets.py), so that all shapes depend on this
            number alone; None: no padding.
    """
    counts = np.array([block.num_rows for block in blocks], dtype=np.int64)
    row_indptr = np.concatenate([[0], np.cumsum(counts)])
    used = int(row_indptr[-1])
    total = used if num_rows is None else num_rows
    assert used <= total, f"{used} rows do not fit {total}"
    slots = np.zeros(total, dtype=np.int32)
    path_len = np.ones(total, dtype=np.int32)
    width = MAX_TREE_NODES
    if num_rows is None:
        width = max([block.path.shape[1] for block in blocks if block.path is not None], default=1)
    offsets = np.zeros((total, width), dtype=np.int32)
    for block, start, stop in zip(blocks, row_indptr[:-1], row_indptr[1:], strict=True):
        steps = np.arange(block.num_rows, dtype=np.int64)
        if block.writes_kv:
            slots[start:stop] = pool.slots(block.req_idx, block.first_slot + steps)
        path_len[start:stop] = (steps if block.depth is None else block.depth) + 1
        if block.path is not None:
            offsets[start:stop, : block.path.shape[1]] = block.path
    num_padded = 0 if num_rows is None else num_rows - len(blocks)

    def per_request(values: Sequence[int], padding: int, dtype: type) -> NDArray[Any]:
        return np.array([*values, *[padding] * num_padded], dtype=dtype)

    def send(array: NDArray[Any]) -> torch.Tensor:
        return to_device(array, pool.device) if staging is None else staging.add(array)

    attention = TreeAttentionMetadata(
        page_table=pool.page_table,
        req_idx=send(per_request([b.req_idx for b in blocks], 0, np.int32)),
        prefix_len=send(per_request([b.prefix_len for b in blocks], 0, np.int32)),
        row_indptr=send(np.pad(row_indptr, (0, num_padded), mode="edge").astype(np.int32)),
        path_len=send(path_len),
        path_offset=send(offsets),
        is_chain=send(per_request([b.depth is None for b in blocks], 1, np.bool_)),
        page_size=pool.page_size,
        window=window,
        # A captured step must serve trees, whatever it was captured with.
        has_trees=num_rows is not None or any(block.depth is not None for block in blocks),
    )
    return PackedRows(slot_mapping=send(slots), attention=attention, row_indptr=row_indptr)
