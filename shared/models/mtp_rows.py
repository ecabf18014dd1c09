"""Where the rows of later layers of multi-token prediction lie.

Layer k reads, with the token of a row, what layer k - 1 returned for the row before it: its first
row is that of index k. So it keeps row p at KV index p - k, its *lag* being k, and the rows of a
forward, and what they see, are those of layer 0 moved by k.

A row has one number here, that of layer 0, whatever layer computes it. docs/draft-kinds.md numbers
the rows of each layer by their position in it, as the paper does: row p of layer k there is row
p + k here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shared.kernels.tree_attention import TreeAttentionMetadata
from shared.models.attention import ForwardInput


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggedRows:
    """The rows of a forward as one layer computes them, where those of a request are a chain.

    Args:
        source: [T] i64, the row of the forward that each row is.
        place: [T] i64, the row of the layer that each row of the forward is, or any other where the
            layer has none.
        inputs: Of the layer's rows.
    """

    source: torch.Tensor
    place: torch.Tensor
    inputs: ForwardInput


class RowBlocks:
    """The rows of a forward, request by request.

    Args:
        inputs: Of layer 0; rows of slot 0 keep no KV.
    """

    def __init__(self, inputs: ForwardInput) -> None:
        self._inputs = inputs
        self._attention = attention = inputs.attention
        slot_mapping = inputs.slot_mapping
        indptr = attention.row_indptr
        num_rows, num_reqs = len(slot_mapping), len(attention.req_idx)
        row = torch.arange(num_rows, dtype=indptr.dtype, device=indptr.device)
        block = torch.searchsorted(indptr, row, right=True) - 1
        self._is_padding = block >= num_reqs
        block = block.clamp(max=num_reqs - 1)
        self._row = row.long()
        self._first = torch.where(self._is_padding, self._row, indptr[block].long())
        self._last = torch.where(self._is_padding, self._row, indptr[block + 1].long() - 1)
        self._prefix_len = attention.prefix_len[block].long()
        self.req_idx = attention.req_idx[block].long()

    @property
    def is_first(self) -> torch.Tensor:
        """Return which rows no row of their request precedes in this forward. [T] bool."""
        return self._row == self._first

    def chains(self, lag: int) -> LaggedRows:
        """Return the rows of a layer where those of every request are a chain."""
        num_missing = (lag - self._prefix_len).clamp(min=0)
        source = torch.minimum(self._row + num_missing, self._last)
        return LaggedRows(
            source=source,
            place=torch.maximum(self._row - num_missing, self._first),
            inputs=replace(
                self._inputs,
                token_ids=self._inputs.token_ids[source],
                position_ids=(self._inputs.position_ids[source] - lag).clamp(min=0),
                attention=self._moved(lag),
                slot_mapping=self._slots(lag, self._row - self._first, source),
            ),
        )

    def nodes(self, lag: int) -> ForwardInput:
        """Return the rows of a layer where they are nodes of trees."""
        attention = self._attention
        num_missing = (lag - self._prefix_len).clamp(min=0)[:, None]
        own = attention.path_len[:, None].long() - 1
        offsets = attention.path_offset
        level = torch.arange(offsets.shape[1], device=offsets.device)
        # Nodes that a layer does not have are left out of its paths, but for the row itself.
        path_offset = offsets.gather(1, torch.minimum(level + num_missing, own))
        path_len = (own + 1 - num_missing).clamp(min=1).flatten().int()
        return replace(
            self._inputs,
            position_ids=(self._inputs.position_ids - lag).clamp(min=0),
            attention=replace(self._moved(lag), path_len=path_len, path_offset=path_offset),
            slot_mapping=self._slots(lag, offsets.gather(1, own).flatten().long(), self._row),
        )

    def _moved(self, lag: int) -> TreeAttentionMetadata:
        return replace(self._attention, prefix_len=(self._attention.prefix_len - lag).clamp(min=0))

    def _slots(self, lag: int, offset: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Return the slots of rows at offsets past the layer's prefix; 0 where nothing is kept."""
        index = (self._prefix_len - lag).clamp(min=0) + offset
        page_table, page_size = self._attention.page_table, self._attention.page_size
        pages = page_table[self.req_idx, index // page_size].long()
        slots = pages * page_size + index % page_size
        is_kept = (self._inputs.slot_mapping[source] != 0) & ~self._is_padding
        return torch.where(is_kept, slots, 0).int()
