"""Buffers of the CPU's tree attention, and views into them that all layers of a step share."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from shared.kernels.products_cpu import (
    ALIGNED_VALUES,
    BATCH_ITEMS,
    GROUP_MULTIPLE,
    BatchLibrary,
    padded,
)
from shared.kernels.tree_attention_plan import CPU_KV_TILE, RowSlice

# Below torch's grain size: no thread boundary may fall inside of a vector (see exp2 in the
# reference).
ELEMENTWISE_CHUNK = 1 << 14
# Batches of the workspaces whose views are kept, 3 KB each, and of a single one: views of long
# contexts are many, and what is computed with them takes longer.
_MAX_KEPT_BATCHES = 2048
_MAX_KEPT_BATCHES_OF_ONE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Operands of one batched product of BATCH_ITEMS items, each aligned and padded.

    Args:
        a: [BATCH_ITEMS, M, K].
        b: [BATCH_ITEMS, K, N], stride 0 over items that share a tile.
        out: [BATCH_ITEMS, M, N], dense.
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Where a slice of rows is worked on; nothing in it outlives the slice's turn.

    An item of a product is one row's group of heads and one tile; a row's heads have the same
    places in every item, whatever the slice. n, G, D and Dv are padded numbers of rows, heads of a
    group, and values of a head of K and of V.

    Args:
        rows: The slice.
        q: [Hkv, n, G, D], to be filled with the rows' queries and zeros.
        own_q: [num_own, Hkv, n, G, D], to be filled with the same ones.
        k: [tiles * Hkv * TILE, D] f32, gathered: shared tiles, then own tiles.
        v: [tiles * Hkv * TILE, Dv] f32, likewise.
        score_batches: Queries by keys of all tiles.
        shared_batches: Weights by values of every shared tile, ascending; into `product`.
        own_batches: Weights by values of all own tiles, into `own_products`.
        product: [Hkv, n, G, Dv], of one shared tile.
        own_products: [num_own, Hkv, n, G, Dv].
        scores: [tiles, Hkv, n, G, TILE].
        masked_scores: Those to which the slice's mask is added.
        score_chunks: The same memory as scores, flat, in parts.
        acc: [Hkv, n, G, Dv].
    """

    rows: RowSlice
    q: torch.Tensor
    own_q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    score_batches: tuple[Batch, ...]
    shared_batches: tuple[tuple[Batch, ...], ...]
    own_batches: tuple[Batch, ...]
    product: torch.Tensor
    own_products: torch.Tensor
    scores: torch.Tensor
    masked_scores: torch.Tensor
    score_chunks: tuple[torch.Tensor, ...]
    acc: torch.Tensor

    @property
    def num_batches(self) -> int:
        """Return how many products it has."""
        return len(self.score_batches) + sum(map(len, self.shared_batches)) + len(self.own_batches)


def multiply(library: BatchLibrary, batches: Sequence[Batch]) -> None:
    """Compute products. Mutates: the `out` of every batch."""
    for batch in batches:
        library.multiply(batch.a, batch.b, batch.out)


def make_workspaces(
    slices: Sequence[RowSlice], shape: tuple[int, int, int, int], device: torch.device
) -> tuple[Workspace, ...]:
    """Return a workspace per slice, all in the same memory.

    Args:
        shape: (Hkv, group, d, dv).
    """
    num_kv_heads, group = shape[0], padded(shape[1], GROUP_MULTIPLE)
    head_dim, v_dim = (padded(width, ALIGNED_VALUES) for width in shape[2:])
    row = num_kv_heads * group * head_dim  # values of a row's queries
    out_row = num_kv_heads * group * v_dim
    # A slice of fewer items than a batch has computes with what lies behind them, too.
    spare = BATCH_ITEMS
    num_rows = max((s.num_padded for s in slices), default=0)
    num_own = max((s.num_padded * s.num_own for s in slices), default=0)
    num_items = max((s.num_padded * (s.num_shared + s.num_own) for s in slices), default=0)
    num_gathered = max((len(s.index) for s in slices), default=0)
    sizes = (
        (num_rows + spare) * row,
        (num_own + spare) * row,
        (num_gathered + spare * CPU_KV_TILE) * head_dim,
        (num_gathered + spare * CPU_KV_TILE) * v_dim,
        (num_items + spare) * num_kv_heads * group * CPU_KV_TILE,
        num_rows * out_row,
        (num_own + spare) * out_row,
        num_rows * out_row,
    )
    buffers = _buffers(sizes, device)
    padded_shape = (num_kv_heads, group, head_dim, v_dim)
    return tuple(_cached_workspace(rows, padded_shape, device, buffers) for rows in slices)


class _Memory(threading.local):
    """The buffers of one thread, and views into them. New memory at every step costs more in page
    faults than it is worked on, new views as much as a tenth of the products; views of an outgrown
    buffer keep it alive."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, torch.device], torch.Tensor] = {}
        self.workspaces: dict[Hashable, Workspace] = {}
        self.num_batches = 0

    def keep(self, key: Hashable, workspace: Workspace) -> None:
        """Keep the views of a workspace, unless they are too many; forget others if need be."""
        count = workspace.num_batches
        if count > _MAX_KEPT_BATCHES_OF_ONE:
            return
        if self.num_batches + count > _MAX_KEPT_BATCHES:
            self.forget()
        nothing = torch.empty(0)  # what a slice holds is larger than all views
        rows = replace(workspace.rows, where=slice(0), index=nothing, mask=nothing)
        self.workspaces[key] = replace(workspace, rows=rows)
        self.num_batches += count

    def forget(self) -> None:
        """Drop all views."""
        self.workspaces.clear()
        self.num_batches = 0


@cache
def _memory() -> _Memory:
    return _Memory()


def _buffers(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return flat f32 buffers of at least these sizes; the same ones at every call."""
    memory = _memory()
    held = memory.buffers
    for index, size in enumerate(sizes):
        if (index, device) not in held or len(held[index, device]) < size:
            # They outlive this call: a tensor made in inference mode could not be written outside.
            with torch.inference_mode(mode=False):
                held[index, device] = torch.zeros(size + size // 2, device=device)
            memory.forget()
    return [held[index, device] for index in range(len(sizes))]


def _cached_workspace(
    rows: RowSlice,
    shape: tuple[int, int, int, int],
    device: torch.device,
    buffers: Sequence[torch.Tensor],
) -> Workspace:
    """Return a workspace, with the views of an earlier slice of the same form if there was one."""
    memory = _memory()
    form = (rows.num_padded, rows.num_shared, rows.num_own, len(rows.index), rows.masked_tile)
    key = (form, shape, device)
    kept = memory.workspaces.get(key)
    if kept is not None:
        return replace(kept, rows=rows)
    with torch.inference_mode(mode=False):  # else they could not be written outside of it
        workspace = _workspace(rows, shape, *buffers)
    memory.keep(key, workspace)
    return workspace


def _workspace(
    rows: RowSlice,
    shape: tuple[int, int, int, int],
    q_buffer: torch.Tensor,
    own_q_buffer: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    score_buffer: torch.Tensor,
    product_buffer: torch.Tensor,
    own_product_buffer: torch.Tensor,
    acc_buffer: torch.Tensor,
) -> Workspace:
    num_kv_heads, group, head_dim, v_dim = shape
    n, num_shared, num_own = rows.num_padded, rows.num_shared, rows.num_own
    by_row = (num_kv_heads, n, group, head_dim)
    out_by_row = (num_kv_heads, n, group, v_dim)
    # The same memory where there is one tile of each row: nothing is to be repeated.
    own_q_buffer = q_buffer if num_own == 1 else own_q_buffer
    num_shared_items, num_own_items = num_shared * num_kv_heads, num_own * num_kv_heads * n
    k_tiles = _tiles(k_buffer, num_shared_items + num_own_items, head_dim)
    v_tiles = _tiles(v_buffer, num_shared_items + num_own_items, v_dim)
    q = _part(q_buffer, by_row)
    product = _part(product_buffer, out_by_row)
    num_score_rows = (num_shared_items * n + max(num_own_items, BATCH_ITEMS)) * group
    score_items = _part(score_buffer, (num_score_rows, CPU_KV_TILE)).unflatten(0, (-1, group))
    scores = _part(score_buffer, (num_shared + num_own, num_kv_heads, n, group, CPU_KV_TILE))
    shared_scores = score_items[: num_shared_items * n].unflatten(0, (-1, n))
    score_batches: list[Batch] = []
    shared_batches: list[tuple[Batch, ...]] = []
    for tile in range(num_shared):
        value_batches: list[Batch] = []
        for head in range(num_kv_heads):
            item = tile * num_kv_heads + head
            tile_k = k_tiles[item].t().expand(BATCH_ITEMS, -1, -1)
            tile_v = v_tiles[item].expand(BATCH_ITEMS, -1, -1)
            for part in _batches_of(n):
                weights = shared_scores[item, part]
                score_batches.append(Batch(a=q[head, part], b=tile_k, out=weights))
                value_batches.append(Batch(a=weights, b=tile_v, out=product[head, part]))
        shared_batches.append(tuple(value_batches))
    own_batches: list[Batch] = []
    own_k = k_tiles[num_shared_items:].transpose(1, 2)
    own_v = v_tiles[num_shared_items:]
    own_scores = score_items[num_shared_items * n :]
    own_items = (max(num_own_items, BATCH_ITEMS), group)
    own_q = _part(own_q_buffer, (*own_items, head_dim))
    own_products = _part(own_product_buffer, (*own_items, v_dim))
    for part in _batches_of(num_own_items):
        score_batches.append(Batch(a=own_q[part], b=own_k[part], out=own_scores[part]))
        own_batches.append(Batch(a=own_scores[part], b=own_v[part], out=own_products[part]))
    return Workspace(
        rows=rows,
        q=q,
        own_q=_part(own_q_buffer, (num_own, *by_row)),
        k=_part(k_buffer, (len(rows.index), head_dim)),
        v=_part(v_buffer, (len(rows.index), v_dim)),
        score_batches=tuple(score_batches),
        shared_batches=tuple(shared_batches),
        own_batches=tuple(own_batches),
        product=product,
        own_products=_part(own_product_buffer, (num_own, *out_by_row)),
        scores=scores,
        masked_scores=scores[rows.masked_tile :],
        score_chunks=scores.flatten().split(ELEMENTWISE_CHUNK),
        acc=_part(acc_buffer, out_by_row),
    )


def _tiles(buffer: torch.Tensor, num_tiles: int, head_dim: int) -> torch.Tensor:
    """Return tiles [num_tiles + BATCH_ITEMS, TILE, D]: whole batches, whatever their number."""
    return _part(buffer, (num_tiles + BATCH_ITEMS, CPU_KV_TILE, head_dim))


def _batches_of(count: int) -> Iterator[slice]:
    """Cut items into batches of one size.

    The last one overlaps the one before it, whose items are computed twice with the same bits; of
    fewer items than a batch has, the rest is whatever lies behind them.
    """
    starts = range(0, count - BATCH_ITEMS + 1, BATCH_ITEMS)
    rest = () if count % BATCH_ITEMS == 0 else (max(0, count - BATCH_ITEMS),)
    for start in itertools.chain(starts, rest):
        yield slice(start, start + BATCH_ITEMS)


def _part(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the beginning of a flat buffer in a shape."""
    return buffer[: math.prod(shape)].view(shape)
