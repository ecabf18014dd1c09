"""Attention of tree or chain rows over a paged cache of latents: one KV head, whose keys are rows
of the cache and whose values are the first values of these rows.

Tiles and their order are those of tree attention, and so are the two launches; see
`tree_attention`. Many query heads share a row, so they are dealt out to programs in groups. Chunks
are longer: a state is larger than all that a chunk of tree attention reads.

On Hopper the first kernel is one of its own, of the same bits, where `suits_hopper` says so and
Triton has what it is written in; see `latent_attention_kernels_hopper`.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch
from shared.kernels.dispatch import count_launch, dot_dtype, is_interpreted, use_triton
from shared.kernels.latent_attention_kernels import _finish_latents_kernel, _shared_latents_kernel
from shared.kernels.products_cpu import CpuProducts
from shared.kernels.tree_attention import choose_own_queries, choose_queries, seen_slots
from shared.kernels.tree_attention_cpu import tree_attention_cpu
from shared.kernels.tree_attention_metadata import AttentionParams, TreeAttentionMetadata
from shared.kernels.tree_attention_schedule import Cut, cut_work, schedule, with_schedule
from shared.kernels.tree_attention_tiles import TRITON_KV_TILE

logger = logging.getLogger(__name__)

_LOG2_E = math.log2(math.e)
# Tiles of the shortest chunks, see `TRITON_CHUNK_TILES`.
CHUNK_TILES = 8
# Programs that a step is split into, as far as its chunks go: two per multiprocessor.
_SPLIT_PROGRAMS = 256
# Above either of these a step is not split: its rows fill a GPU, or its states, values of f32, its
# memory.
_MAX_SPLIT_BLOCKS = 128
_MAX_SPLIT_VALUES = 1 << 27
# Columns of a state that are folded at once in memory, and by a program where rows have few heads
# together. Above those there are programs enough if each has all columns of some heads.
_COLUMNS = 128
_FEW_HEADS = 512
# Widths of values and of tails that the kernel for Hopper copies in whole blocks.
_HOPPER_VALUES = (128, 256, 512)
_HOPPER_TAILS = (16, 32, 64)


def latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    metadata: TreeAttentionMetadata,
    scale: float,
    *,
    value_width: int,
    products: CpuProducts | None = None,
) -> torch.Tensor:
    """Attend from every row to its prefix and its own path; a row's bits are as `tree_attention`'s.

    Args:
        q: [T, Hq, d].
        cache: [num_slots, 1, d]; slots that no row sees may hold anything, NaN included.
        metadata: TreeAttentionMetadata of the T rows.
        scale: Multiplies the scores.
        value_width: Values of a cache's row that are its value, its first ones.
        products: How a CPU multiplies; None: by a library.
    Returns: [T, Hq, value_width] in the dtype of q; 0 in padding rows.
    """
    if not use_triton(q):
        params = AttentionParams(scale=scale)
        out = tree_attention_cpu(q, cache, cache, metadata, params, products=products)
        return out[..., :value_width]
    return attend_latents(q, cache, metadata, scale, value_width=value_width)


def attend_latents(
    q: torch.Tensor,
    cache: torch.Tensor,
    metadata: TreeAttentionMetadata,
    scale: float,
    *,
    value_width: int,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Do what `latent_attention` does by its kernels.

    Args:
        num_splits: As in `attend_in_chunks`. The bits are the same.
    """
    num_rows, num_heads, width = q.shape
    assert cache.is_contiguous() and cache.shape[1:] == (1, width) and cache.dtype == q.dtype
    assert q.is_contiguous() and 0 < value_width < width
    out = torch.empty((num_rows, num_heads, value_width), dtype=q.dtype, device=q.device)
    if num_rows == 0 or metadata.req_idx.shape[0] == 0:
        return out.zero_()
    dot = dot_dtype(q)
    cut = _cut(metadata, dot, num_heads, value_width, num_splits)
    assert num_rows == metadata.path_len.shape[0]
    is_prepared = cut in metadata.plans  # else its tables are not complete when programs start
    tables = schedule(metadata, cut)
    groups = num_head_groups(num_heads, dot)
    heads = num_heads // groups
    tail = width - value_width
    num_states = 2 if cut.is_sequential else cut.max_chunks
    states = (num_rows, groups, num_states, heads)
    stats = torch.empty((*states, 2), dtype=torch.float32, device=q.device)
    acc = torch.empty((*states, value_width), dtype=torch.float32, device=q.device)
    value_block = max(16, triton.next_power_of_2(value_width))
    columns = min(_COLUMNS, value_block)
    shape = {
        "DOT_DTYPE": dot,
        "GROUPS": groups,
        "HEADS": heads,
        "VALUE": value_width,
        "TAIL": tail,
        "TILE": TRITON_KV_TILE,
        "CHUNK_TILES": CHUNK_TILES,
        "SEQUENTIAL": cut.is_sequential,
    }
    blocks = {
        "VALUE_BLOCK": value_block,
        "TAIL_BLOCK": max(16, triton.next_power_of_2(tail)),
    }
    shared_shape = shape | {
        "HEADS_BLOCK": triton.next_power_of_2(heads),
        "PAGE_SIZE": metadata.page_size,
        "HAS_WINDOW": metadata.window > 0,
        "ROWS": cut.rows,
    }
    shared_kernel, options = _hopper_kernel_for(q, cache, value_width), hopper_options()
    if shared_kernel is None:
        shared_kernel, options = _shared_latents_kernel, shared_options(dot)
        shared_shape |= blocks | {"COLUMNS": columns}
    count_launch("latent_attention")
    shared_kernel[(groups, cut.num_programs)](
        q,
        cache,
        stats,
        acc,
        metadata.page_table,
        tables.blocks,
        tables.rows,
        num_states,
        scale * _LOG2_E,
        **shared_shape,
        **options,
        **dependent_launch(q, is_early=is_prepared),
    )
    own_queries = choose_own_queries(dot, q.device)
    parts = groups * triton.cdiv(heads, own_queries)
    if num_rows * num_heads > _FEW_HEADS and dot != tl.float32:
        columns = value_block
    _finish_latents_kernel[(num_rows, parts, value_block // columns)](
        q,
        cache,
        out,
        stats,
        acc,
        tables.own_slots,
        tables.rows,
        num_states,
        scale * _LOG2_E,
        **shape,
        **blocks,
        COLUMNS=columns,
        OWN_SLOTS=tables.own_slots.shape[1],
        QUERIES=own_queries,
        **finish_options(),
        **dependent_launch(q),
    )
    return out


def prepared_latents(
    metadata: TreeAttentionMetadata, q_dtype: torch.dtype, num_heads: int, value_width: int
) -> TreeAttentionMetadata:
    """Do what `prepared` does, for layers of latent attention."""

    def cut(metadata: TreeAttentionMetadata, dot: tl.dtype) -> Cut:
        return _cut(metadata, dot, num_heads, value_width, None)

    return with_schedule(metadata, q_dtype, cut)


def num_head_groups(num_heads: int, dot: tl.dtype) -> int:
    """Return into how many groups, equally large, the heads of a row are dealt out."""
    groups = -(-num_heads // choose_queries(dot))
    while num_heads % groups:
        groups += 1
    return groups


def _cut(
    metadata: TreeAttentionMetadata,
    dot: tl.dtype,
    num_heads: int,
    value_width: int,
    num_splits: int | None,
) -> Cut:
    """Return how the work is cut, see `attend_latents`."""
    groups = num_head_groups(num_heads, dot)
    row_values = metadata.path_len.shape[0] * num_heads * value_width

    def is_small(num_blocks: int, max_chunks: int) -> bool:
        has_room = row_values * max_chunks <= _MAX_SPLIT_VALUES
        return num_blocks * groups <= _MAX_SPLIT_BLOCKS and has_room

    return cut_work(
        metadata,
        rows=max(1, choose_queries(dot) // triton.next_power_of_2(num_heads // groups)),
        chunk_tiles=CHUNK_TILES,
        num_splits=num_splits,
        wanted=_SPLIT_PROGRAMS // groups,
        is_small=is_small,
    )


def shared_options(dot: tl.dtype) -> dict[str, int]:
    """Return launch options by which states stay in registers and tiles fit into shared memory."""
    return {"num_warps": 8, "num_stages": 1 if dot == tl.float32 else 2}


def hopper_options() -> dict[str, int]:
    """Return those of the kernel for Hopper: two warpgroups, and it stages tiles itself."""
    return {"num_warps": 8}


def finish_options() -> dict[str, int]:
    """Return launch options likewise."""
    return {"num_warps": 8, "num_stages": 1}


def suits_hopper(capability: int, dtype: torch.dtype, value_width: int, tail: int) -> bool:
    """Return whether the kernel for Hopper can take values of this dtype and of these widths.

    Args:
        capability: The major one of the GPU.
    """
    has_widths = value_width in _HOPPER_VALUES and tail in _HOPPER_TAILS
    return capability == 9 and dtype in (torch.bfloat16, torch.float16) and has_widths


@functools.cache
def hopper_kernel() -> Any | None:
    """Return the kernel for Hopper; None, and a line in the log, if this Triton lacks something."""
    try:
        from shared.kernels import latent_attention_kernels_hopper as hopper
    except (ImportError, AttributeError) as error:
        logger.warning(
            "latent attention: Triton %s lacks what the kernel for Hopper needs (%s); the slower "
            "one is used, outputs are the same",
            triton.__version__,
            error,
        )
        return None
    return hopper._shared_latents_hopper_kernel


def _hopper_kernel_for(q: torch.Tensor, cache: torch.Tensor, value_width: int) -> Any | None:
    """Return the kernel for Hopper if it is for these operands: it copies 16 bytes at a time."""
    if is_interpreted() or not q.is_cuda or q.data_ptr() % 16 or cache.data_ptr() % 16:
        return None
    capability = torch.cuda.get_device_capability(q.device)[0]
    is_suited = suits_hopper(capability, q.dtype, value_width, q.shape[2] - value_width)
    return hopper_kernel() if is_suited else None


def latent_attention_ref(
    q: torch.Tensor,
    cache: torch.Tensor,
    metadata: TreeAttentionMetadata,
    scale: float,
    *,
    value_width: int,
) -> torch.Tensor:
    """Do what `latent_attention` does in plain torch, one row at a time; return f64."""
    out = torch.zeros((*q.shape[:2], value_width), dtype=torch.float64, device=q.device)
    for row, slots in seen_slots(metadata):
        latents = cache[slots, 0].double()  # [L, d]
        weights = (q[row].double() @ latents.T * scale).softmax(-1)
        out[row] = weights @ latents[:, :value_width]
    return out
