"""Buffers of the CPU's tree attention, and views into them that all layers of a step share."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from shared.kernels.tree_attention_plan import CPU_KV_TILE, RowSlice

# Below torch's grain size: no thread boundary may fall inside of a vector (see exp2 in the
# reference).
_ELEMENTWISE_CHUNK = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTile:
    """One tile that all rows of a slice share, for one KV head.

    Args:
        k: [n, d, TILE], stride 0 over rows.
        v: [n, TILE, d], stride 0 over rows.
        scores: [n, group, TILE].
    """

    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Where a slice of rows is worked on; nothing in it outlives the slice's turn.

    Args:
        rows: The slice.
        k: [tiles * Hkv * TILE, d] f32, gathered: shared tiles, then own tiles as [num_own, n].
        v: as k.
        shared: The shared tiles of every KV head, ascending.
        product: [n, group, d], of one shared tile.
        own_k: [num_own * n * Hkv, d, TILE].
        own_v: [num_own * n * Hkv, TILE, d].
        own_scores: [num_own * n * Hkv, group, TILE].
        own_products: [num_own * n * Hkv, group, d].
        own_product_tiles: The same by own tile, each [n, Hkv, group, d].
        scores: [tiles, n, H, TILE].
        masked_scores: Those to which the slice's mask is added.
        score_chunks: The same memory as scores, flat, in parts.
    """

    rows: RowSlice
    k: torch.Tensor
    v: torch.Tensor
    shared: tuple[tuple[SharedTile, ...], ...]
    product: torch.Tensor
    own_k: torch.Tensor
    own_v: torch.Tensor
    own_scores: torch.Tensor
    own_products: torch.Tensor
    own_product_tiles: tuple[torch.Tensor, ...]
    scores: torch.Tensor
    masked_scores: torch.Tensor
    score_chunks: tuple[torch.Tensor, ...]


def make_workspaces(
    slices: Sequence[RowSlice], shape: tuple[int, int, int], device: torch.device
) -> tuple[Workspace, ...]:
    """Return a workspace per slice, all in the same memory.

    Args:
        shape: (Hkv, group, d).
    """
    num_kv_heads, group, head_dim = shape
    num_heads = num_kv_heads * group
    num_items = max((s.num_rows * (s.num_shared + s.num_own) for s in slices), default=0)
    num_products = max((s.num_rows * max(1, s.num_own) for s in slices), default=0)
    num_gathered = max((len(s.index) for s in slices), default=0)
    sizes = (
        num_gathered * head_dim,
        num_gathered * head_dim,
        num_items * num_heads * CPU_KV_TILE,
        num_products * num_heads * head_dim,
    )
    buffers = _buffers(sizes, device)
    return tuple(_workspace(rows, shape, *buffers) for rows in slices)


class _Memory(threading.local):
    """The buffers of one thread. New memory at every step costs more in page faults than it is
    worked on; views of an outgrown buffer keep it alive."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, torch.device], torch.Tensor] = {}


@cache
def _memory() -> _Memory:
    return _Memory()


def _buffers(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return flat f32 buffers of at least these sizes; the same ones at every call."""
    held = _memory().buffers
    for index, size in enumerate(sizes):
        if (index, device) not in held or len(held[index, device]) < size:
            # They outlive this call: a tensor made in inference mode could not be written outside.
            with torch.inference_mode(mode=False):
                held[index, device] = torch.empty(size + size // 2, device=device)
    return [held[index, device] for index in range(len(sizes))]


def _workspace(
    rows: RowSlice,
    shape: tuple[int, int, int],
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    score_buffer: torch.Tensor,
    product_buffer: torch.Tensor,
) -> Workspace:
    num_kv_heads, group, head_dim = shape
    n, num_shared, num_own = rows.num_rows, rows.num_shared, rows.num_own
    k = _part(k_buffer, (len(rows.index), head_dim))
    v = _part(v_buffer, (len(rows.index), head_dim))
    k_tiles = k.view(-1, num_kv_heads, CPU_KV_TILE, head_dim)
    v_tiles = v.view(-1, num_kv_heads, CPU_KV_TILE, head_dim)
    scores = _part(score_buffer, (num_shared + num_own, n, num_kv_heads, group, CPU_KV_TILE))
    own_products = _part(product_buffer, (num_own, n, num_kv_heads, group, head_dim))
    by_head = scores.flatten(2, 3)
    return Workspace(
        rows=rows,
        k=k,
        v=v,
        shared=tuple(
            _shared_tiles(k_tiles, v_tiles, scores, num_shared, head)
            for head in range(num_kv_heads if num_shared else 0)
        ),
        product=_part(product_buffer, (n, group, head_dim)),
        own_k=k_tiles[num_shared:].flatten(0, 1).transpose(1, 2),
        own_v=v_tiles[num_shared:].flatten(0, 1),
        own_scores=scores[num_shared:].flatten(0, 2),
        own_products=own_products.flatten(0, 2),
        own_product_tiles=own_products.unbind(),
        scores=by_head,
        masked_scores=by_head[rows.masked_tile :],
        score_chunks=scores.flatten().split(_ELEMENTWISE_CHUNK),
    )


def _shared_tiles(
    k_tiles: torch.Tensor, v_tiles: torch.Tensor, scores: torch.Tensor, num_shared: int, head: int
) -> tuple[SharedTile, ...]:
    num_rows = scores.shape[1]
    k = k_tiles[:num_shared, head, None].expand(-1, num_rows, -1, -1).transpose(2, 3).unbind()
    v = v_tiles[:num_shared, head, None].expand(-1, num_rows, -1, -1).unbind()
    tile_scores = scores[:num_shared, :, head].unbind()
    return tuple(
        SharedTile(k=one_k, v=one_v, scores=one_scores)
        for one_k, one_v, one_scores in zip(k, v, tile_scores, strict=True)
    )


def _part(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the beginning of a flat buffer in a shape."""
    return buffer[: math.prod(shape)].view(shape)
