"""Rows of new tokens for a model, without an engine around it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kv.layout import KVLayout
from shared.kv.pool import KVPool
from shared.models.attention import ForwardInput
from shared.step.packing import RowBlocks, pack_rows, to_device
from shared.step.staging import Staging
from shared.tree import depths_of, lay_out_tree


def new_pool(
    layout: KVLayout,
    *,
    num_requests: int,
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int = 16,
) -> tuple[KVPool, list[int]]:
    """Return a pool, and a row of its page table per request.

    Args:
        num_tokens: Slots of each request.
    """
    num_pages = -(-num_tokens // page_size)
    pool = KVPool(
        layout=layout,
        num_pages=1 + num_requests * num_pages,
        page_size=page_size,
        max_num_requests=num_requests,
        max_pages_per_request=num_pages,
        dtype=dtype,
        device=device,
    )
    return pool, [acquire(pool, num_tokens) for _ in range(num_requests)]


def fill_noise(pool: KVPool) -> None:
    """Fill every slot with values of the size that keys and values have.

    Mutates: the whole pool.
    """
    generator = torch.Generator(device=pool.device).manual_seed(0)
    for cache in pool.caches:
        cache.normal_(generator=generator)


def acquire(pool: KVPool, num_tokens: int) -> int:
    """Return a row of the page table with room for `num_tokens`."""
    req_idx = pool.acquire()
    pool.reserve(req_idx, num_tokens)
    return req_idx


def build_rows(
    pool: KVPool,
    req_idx: Sequence[int],
    token_ids: NDArray[np.int64],
    *,
    prefix_len: int = 0,
    parents: NDArray[np.int32] | None = None,
) -> ForwardInput:
    """Return equally many rows of several requests, after equally long prefixes.

    Args:
        token_ids: [R, N].
        parents: [N] of a tree; None: chains.
    """
    num_reqs, num_rows = token_ids.shape
    step, trees = np.arange(num_rows), []
    if parents is not None:
        layout = lay_out_tree(tuple(parents.tolist()))
        step, trees = depths_of([layout]), [layout] * num_reqs
    blocks = RowBlocks(
        req_idx=req_idx,
        prefix_len=[prefix_len] * num_reqs,
        num_rows=[num_rows] * num_reqs,
        trees=trees,
    )
    staging = Staging(pool.device, 1 << 20)
    packed = pack_rows(blocks, pool, staging=staging)
    staging.flush()
    position_ids = np.tile(prefix_len + step, num_reqs)
    return packed.forward_input(
        to_device(token_ids.reshape(-1), pool.device), to_device(position_ids, pool.device), pool
    )


def tree_of(num_nodes: int) -> NDArray[np.int32]:
    """Return the parents of a tree in which every node has two children, level by level."""
    return ((np.arange(num_nodes) - 1) // 2).astype(np.int32)
