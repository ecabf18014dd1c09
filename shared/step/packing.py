"""Pack rows of many requests into the tensors of one forward.

Everything a model computes is the same *extend*: rows of new tokens per request, the committed
prefix in pages, and each row's own path inside the block. A prefill chunk is a chain, plain
decoding a tree of one node, verification a tree of N.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.tree_attention import TreeAttentionMetadata
from shared.kv.pool import KVPool
from shared.messages import MAX_TREE_NODES
from shared.models.attention import ForwardInput
from shared.step.buckets import bucket_of
from shared.step.staging import Fields, Staging
from shared.tree import TreeLayout, paths_of

_LEAST_FEW_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlocks:
    """The rows of R requests in one forward, a block each, one after the other.

    Args:
        req_idx: [R], rows of the page table.
        prefix_len: [R], committed logical slots that every row of the block sees; row i writes slot
            prefix_len + i.
        num_rows: [R].
        trees: Of the first blocks, offsets of whose rows are the nodes; the others are chains.
        writes_kv: [R]; False: the rows' KV is committed already (replay), and theirs goes to the
            sink. None: all do.
    """

    req_idx: Sequence[int]
    prefix_len: Sequence[int]
    num_rows: Sequence[int]
    trees: Sequence[TreeLayout] = ()
    writes_kv: Sequence[bool] | None = None


NO_BLOCKS = RowBlocks(req_idx=(), prefix_len=(), num_rows=())


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Where the rows of a forward lie.

    Args:
        slot_mapping: [T] i32, slot that each row's KV goes to.
        attention: What each row sees.
        row_indptr: [R + 1] on the host: rows of block r are [row_indptr[r], row_indptr[r + 1]).
        path_len: [num_rows] i32 on the host, without padding; valid until the next step is staged.
    """

    slot_mapping: torch.Tensor
    attention: TreeAttentionMetadata
    row_indptr: Sequence[int]
    path_len: NDArray[np.int32]

    def forward_input(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, pool: KVPool
    ) -> ForwardInput:
        """Return what a model computes the rows from."""
        return ForwardInput(
            token_ids=token_ids,
            position_ids=position_ids,
            slot_mapping=self.slot_mapping,
            attention=self.attention,
            kv=pool,
        )

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
    few_rows: int = 0,
) -> PackedRows:
    """Lay the blocks of one forward out.

    Args:
        staging: What brings it all to the device at its next flush.
        window: Sliding window of the model, tokens; 0 = none.
        num_rows: Rows to pad to (see buckets.py), so that all shapes depend on this number alone;
            None: no padding.
        few_rows: Padded steps of which no request has more rows are captured apart, see
            `captures_few_rows`; 0: none is.
    """
    num_trees, count = len(blocks.trees), len(blocks.req_idx)
    row_indptr = [0, *accumulate(blocks.num_rows)]
    used = row_indptr[-1]
    total, num_reqs = used, count
    if num_rows is not None:
        total, num_reqs = num_rows, padded_blocks(num_rows, pool)
    assert used <= total, f"{used} rows do not fit {total}"
    assert count <= num_reqs, f"{count} blocks do not fit {num_reqs}"
    are_chains = [tree.is_chain for tree in blocks.trees]
    has_trees = not all(are_chains)
    # A captured step must serve trees, whatever it was captured with.
    is_captured = num_rows is not None
    most_rows = 0
    if captures_few_rows(total, pool, few_rows) and max(blocks.num_rows, default=0) <= few_rows:
        most_rows = few_rows
    width = MAX_TREE_NODES if has_trees or is_captured else 1
    host, device = staging.place_zeros(_fields, total, num_reqs, width)
    host["slot_mapping"][:used] = np.frombuffer(_slots_of(blocks, pool), np.int32)
    host["req_idx"][:count] = blocks.req_idx
    host["prefix_len"][:count] = blocks.prefix_len
    host["row_indptr"][: count + 1] = row_indptr
    host["row_indptr"][count + 1 :] = used
    host["path_len"][:used] = _path_lens_of(blocks)
    host["path_len"][used:] = 1
    host["is_chain"][:] = True
    if has_trees:  # the paths of chains are not read
        host["path_offset"][: row_indptr[num_trees]] = paths_of(blocks.trees)
        host["is_chain"][:num_trees] = are_chains
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
        has_trees=has_trees or is_captured,
        most_rows=most_rows,
    )
    return PackedRows(
        slot_mapping=device["slot_mapping"],
        attention=attention,
        row_indptr=row_indptr,
        path_len=host["path_len"][:used],
    )


def captures_few_rows(num_rows: int, pool: KVPool, few_rows: int) -> bool:
    """Return whether steps padded to so many rows are captured apart if no request has many.

    Attention of small steps would gain nothing, and larger ones than all requests there are none.
    """
    most = bucket_of(few_rows * pool.max_num_requests)
    return num_rows >= _LEAST_FEW_ROWS and (most is None or num_rows <= most)


def _slots_of(blocks: RowBlocks, pool: KVPool) -> array[int]:
    """Return the slot of every row; the sink's where nothing is written."""
    slots = array("i")
    writes_kv = blocks.writes_kv or [True] * len(blocks.req_idx)
    for req_idx, first, size, writes in zip(
        blocks.req_idx, blocks.prefix_len, blocks.num_rows, writes_kv, strict=True
    ):
        if writes:
            slots += pool.slot_range(req_idx, first, first + size)
        else:
            slots.extend([0] * size)
    return slots


def _path_lens_of(blocks: RowBlocks) -> list[int]:
    """Return how many rows of its block every row sees, its own included."""
    path_len: list[int] = []
    for tree in blocks.trees:
        path_len += tree.path_len
    for size in blocks.num_rows[len(blocks.trees) :]:
        path_len += range(1, size + 1)
    return path_len


def padded_blocks(num_rows: int, pool: KVPool) -> int:
    """Return how many blocks a step of a bucket is padded to: as many as it can have.

    A request has two at most: rows of its own, and a replay beside them.
    """
    return min(num_rows, 2 * pool.max_num_requests)


def _fields(num_rows: int, num_reqs: int, width: int) -> Fields:
    return {
        "slot_mapping": (torch.int32, (num_rows,)),
        "req_idx": (torch.int32, (num_reqs,)),
        "prefix_len": (torch.int32, (num_reqs,)),
        "row_indptr": (torch.int32, (num_reqs + 1,)),
        "path_len": (torch.int32, (num_rows,)),
        "path_offset": (torch.int32, (num_rows, width)),
        "is_chain": (torch.bool, (num_reqs,)),
    }
