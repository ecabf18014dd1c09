"""Where the K and V of a forward's rows lie in the caches."""

from __future__ import annotations

import torch

from shared.kernels.page_slots import slots_in
from shared.kernels.tree_attention import TreeAttentionMetadata


def own_slots(attention: TreeAttentionMetadata) -> torch.Tensor:
    """Return the slot in which each row sees its own K and V, also where it writes none (replay).

    Returns: [T] i64; of padding rows any slot.
    """
    indptr, offsets = attention.row_indptr, attention.path_offset
    row = torch.arange(len(offsets), dtype=indptr.dtype, device=indptr.device)
    block = torch.searchsorted(indptr, row, right=True) - 1
    block = block.clamp(max=len(attention.req_idx) - 1)
    last = (attention.path_len - 1).clamp(max=offsets.shape[1] - 1).long()
    in_tree = offsets.gather(1, last[:, None])[:, 0]
    offset = torch.where(attention.is_chain[block], row - indptr[block], in_tree)
    offset = torch.where(row < indptr[-1], offset, 0)
    index = (attention.prefix_len[block] + offset).long()
    req_idx = attention.req_idx[block].long()
    return slots_in(attention.page_table, req_idx, index, attention.page_size).long()
