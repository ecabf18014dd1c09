"""A stand-in for the KV pool: permuted pages, caches poisoned with NaN, rows by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.kernels.tree_attention import TreeAttentionMetadata
from shared.kv.layout import KVLayout
from shared.models.attention import ForwardInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """New rows of one request.

    Args:
        paths: Per row, the offsets from prefix_len of its path, itself last; None: a chain.
    """

    req_idx: int
    prefix_len: int
    num_rows: int
    paths: Sequence[Sequence[int]] | None = None


class PagedKV:
    """Caches and a page table whose pages lie in random order.

    Args:
        poison: What every slot holds until it is written.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        page_size: int = 4,
        max_tokens: int = 128,
        num_requests: int = 1,
        dtype: torch.dtype = torch.float32,
        poison: float = float("nan"),
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.page_size = page_size
        self.device = device or torch.device("cpu")
        pages_per_request = -(-max_tokens // page_size)
        num_pages = 1 + num_requests * pages_per_request
        self.layers = [
            tuple(torch.full(shape, poison, dtype=dtype, device=self.device) for shape in shapes)
            for shapes in layout.cache_shapes(num_pages * page_size)
        ]
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self._pages = order.view(num_requests, pages_per_request)
        self.page_table = self._int32(self._pages.tolist())

    def slots(self, req_idx: int, logical: Sequence[int]) -> torch.Tensor:
        """Map logical slots of one request to slots of the caches. [n] i32 on the device."""
        slots = torch.tensor(list(logical), dtype=torch.int64)
        pages = self._pages[req_idx][slots // self.page_size]
        return self._int32((pages * self.page_size + slots % self.page_size).tolist())

    def rows(
        self, token_ids: Sequence[int] | torch.Tensor, blocks: Sequence[Block], *, window: int = 0
    ) -> ForwardInput:
        """Return the blocks' rows, at the positions that they have from the prefix on."""
        paths = [
            list(path)
            for block in blocks
            for path in (
                block.paths
                if block.paths is not None
                else [range(i + 1) for i in range(block.num_rows)]
            )
        ]
        depth = max(map(len, paths))
        sizes = [block.num_rows for block in blocks]
        slots, positions, start = [], [], 0
        for block in blocks:
            own = paths[start : start + block.num_rows]
            slots.append(self.slots(block.req_idx, [block.prefix_len + path[-1] for path in own]))
            positions += [block.prefix_len + len(path) - 1 for path in own]
            start += block.num_rows
        metadata = TreeAttentionMetadata(
            page_table=self.page_table,
            req_idx=self._int32([block.req_idx for block in blocks]),
            prefix_len=self._int32([block.prefix_len for block in blocks]),
            row_indptr=self._int32([sum(sizes[:i]) for i in range(len(sizes) + 1)]),
            path_len=self._int32([len(path) for path in paths]),
            path_offset=self._int32([path + [0] * (depth - len(path)) for path in paths]),
            is_chain=torch.tensor([block.paths is None for block in blocks], device=self.device),
            page_size=self.page_size,
            window=window,
        )
        return ForwardInput(
            token_ids=torch.as_tensor(token_ids, device=self.device),
            position_ids=torch.tensor(positions, device=self.device),
            slot_mapping=torch.cat(slots),
            attention=metadata,
            kv=self,
        )

    def chain(
        self, token_ids: Sequence[int] | torch.Tensor, prefix_len: int = 0, *, window: int = 0
    ) -> ForwardInput:
        """Return the rows of the first request's next tokens."""
        block = Block(req_idx=0, prefix_len=prefix_len, num_rows=len(token_ids))
        return self.rows(token_ids, [block], window=window)

    def _int32(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
