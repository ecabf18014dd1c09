"""Batches of trees and chains over poisoned paged caches, and their attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shared.kernels.tree_attention import (
    AttentionParams,
    TreeAttentionMetadata,
    tree_attention,
    tree_attention_ref,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The rows of one request, with everything that they see.

    Args:
        q: [N, Hq, d].
        k: [prefix_len + N, Hkv, d] by logical slot.
        v: [prefix_len + N, Hkv, dv] by logical slot.
        prefix_len: Tokens that all rows see.
        parents: [N] index of each row's parent in the block, -1 above the first; None: a chain.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    prefix_len: int
    parents: tuple[int, ...] | None = None

    def path(self, row: int) -> list[int]:
        """Return the rows that a row sees, itself last."""
        if self.parents is None:
            return list(range(row + 1))
        path = []
        while row >= 0:
            path.append(row)
            row = self.parents[row]
        return path[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Arguments of tree_attention."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    metadata: TreeAttentionMetadata


def random_block(
    prefix_len: int,
    shape: int | tuple[int, ...],
    *,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    v_dim: int | None = None,
) -> Block:
    """Return a block of random values.

    Args:
        shape: The length of a chain, or the parents of a tree.
        v_dim: Values of a head of V; None: as many as of the others.
    """
    num_rows = shape if isinstance(shape, int) else len(shape)
    kv_shape = (prefix_len + num_rows, num_kv_heads)
    return Block(
        q=torch.randn(num_rows, num_heads, head_dim),
        k=torch.randn(*kv_shape, head_dim),
        v=torch.randn(*kv_shape, v_dim or head_dim),
        prefix_len=prefix_len,
        parents=None if isinstance(shape, int) else shape,
    )


def pack(
    blocks: Sequence[Block],
    *,
    page_size: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    num_padding_rows: int = 0,
) -> Batch:
    """Lay blocks out in permuted pages of caches full of NaN, the sink page included.

    Pages that lie wholly below every row's window are given back: their entry is the sink.
    """
    generator = torch.Generator().manual_seed(page_size)
    pages_of = [-(-len(block.k) // page_size) for block in blocks]
    order = torch.randperm(sum(pages_of) + 3, generator=generator) + 1
    page_table = torch.zeros((len(blocks) + 2, max(pages_of) + 1), dtype=torch.int32)
    req_idx = torch.arange(len(blocks), dtype=torch.int32).flip(0) + 1
    num_slots = (len(order) + 1) * page_size
    shapes = [tensor.shape[1:] for tensor in (blocks[0].k, blocks[0].v)]
    caches = [torch.full((num_slots, *shape), torch.nan) for shape in shapes]
    paths = [[block.path(row) for row in range(len(block.q))] for block in blocks]
    depth = max(len(path) for block in paths for path in block)
    num_rows = [len(block.q) for block in blocks]
    path_offset = torch.full((sum(num_rows) + num_padding_rows, depth), -(1 << 20)).int()
    path_len = torch.ones(sum(num_rows) + num_padding_rows, dtype=torch.int32)
    first_page = row = 0
    for block, block_paths, num_pages, index in zip(blocks, paths, pages_of, req_idx, strict=True):
        pages = order[first_page : first_page + num_pages]
        page_table[index, :num_pages] = pages.int()
        logical = torch.arange(len(block.k))
        slots = pages[logical // page_size] * page_size + logical % page_size
        caches[0][slots], caches[1][slots] = block.k, block.v
        if window:
            first_seen = max(0, block.prefix_len + 1 - window)
            page_table[index, : first_seen // page_size] = 0
        first_page += num_pages
        for path in block_paths:
            path_len[row] = len(path)
            path_offset[row, : len(path)] = torch.tensor(path)
            row += 1
    q = torch.cat([block.q for block in blocks])
    padding = torch.full((num_padding_rows, *q.shape[1:]), torch.nan)
    metadata = TreeAttentionMetadata(
        page_table=page_table.to(device),
        req_idx=req_idx.to(device),
        prefix_len=torch.tensor([block.prefix_len for block in blocks]).int().to(device),
        row_indptr=torch.tensor([0, *num_rows]).cumsum(0).int().to(device),
        path_len=path_len.to(device),
        path_offset=path_offset.to(device),
        is_chain=torch.tensor([block.parents is None for block in blocks]).to(device),
        page_size=page_size,
        window=window,
    )
    return Batch(
        q=torch.cat((q, padding)).to(device, dtype),
        k_cache=caches[0].to(device, dtype),
        v_cache=caches[1].to(device, dtype),
        metadata=metadata,
    )


def exact(
    batch: Batch, scale: float, sinks: torch.Tensor | None = None, *, softcap: float = 0.0
) -> torch.Tensor:
    """Return the attention of every row in float64, on the CPU. [T, Hq, dv]."""
    params = AttentionParams(scale=scale, sinks=sinks, softcap=softcap)
    return tree_attention_ref(batch.q, batch.k_cache, batch.v_cache, batch.metadata, params).cpu()


def attention_of(batch: Batch, scale: float, **fields: Any) -> torch.Tensor:
    """Return what `tree_attention` has of every row. [T, Hq, dv]."""
    params = AttentionParams(scale=scale, **fields)
    return tree_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, params)
