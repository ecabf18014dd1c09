"""Move the K/V rows of accepted paths to the front, in every layer; a path may overlap itself.

Grid: (num_caches, num_requests). Rows that stay where they are, padding included, cost no traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton
from shared.kernels.fp8_cache import as_bytes


@triton.jit(do_not_specialize=["num_steps"])
def _move_paths_kernel(
    cache_address_ptr,  # [num_caches] i64, addresses of [num_slots, Hkv, d]; those are mutated
    src_ptr,  # [B, D] i32
    dst_ptr,  # [B, D] i32
    cache_like_ptr,  # [num_slots, Hkv, d], unread: its dtype is that of the caches; of FP8 u8
    num_steps,  # D
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    first = tl.program_id(1).to(tl.int64) * num_steps
    step = tl.arange(0, STEPS)
    in_path = step < num_steps
    path_src = tl.load(src_ptr + first + step, mask=in_path, other=0)
    path_dst = tl.load(dst_ptr + first + step, mask=in_path, other=0)
    end = tl.max(tl.where(path_src != path_dst, step + 1, 0), axis=0)
    cache_ptr = tl.load(cache_address_ptr + tl.program_id(0).to(tl.int64))
    cache_ptr = cache_ptr.to(tl.pointer_type(cache_like_ptr.dtype.element_ty))
    column = tl.arange(0, BLOCK)
    in_row = column < ROW
    for move in range(0, end):
        src = tl.load(src_ptr + first + move).to(tl.int64)
        dst = tl.load(dst_ptr + first + move).to(tl.int64)
        # A thread loads the columns that it stores: what a later move overwrites has been read.
        is_moved = in_row & (src != dst)
        row = tl.load(cache_ptr + src * ROW + column, mask=is_moved, other=0.0)
        tl.store(cache_ptr + dst * ROW + column, row, mask=is_moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Caches whose rows one launch moves.

    Args:
        caches: Each [num_slots, Hkv, d], dense, of one shape, dtype and device.
        addresses: [num_caches] i64 on their device, where they lie.
    """

    caches: Sequence[torch.Tensor]
    addresses: torch.Tensor


def group_caches(caches: Sequence[torch.Tensor]) -> list[CacheGroup]:
    """Return the caches of all layers by their shapes; one group where all layers are alike.

    Args:
        caches: Each [num_slots, Hkv, d], dense, of one dtype and device.
    """
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for cache in caches:
        assert cache.is_contiguous() and cache.dtype == caches[0].dtype
        by_shape.setdefault(cache.shape, []).append(cache)
    return [
        CacheGroup(
            caches=group,
            addresses=torch.tensor([cache.data_ptr() for cache in group], dtype=torch.int64).to(
                group[0].device
            ),
        )
        for group in by_shape.values()
    ]


def move_paths(groups: Sequence[CacheGroup], src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy slot src[b, m] to slot dst[b, m] in every cache, path by path in ascending order of m.

    Args:
        groups: What `group_caches` said of the caches of all layers.
        src, dst: [B, D] i32. No destination is a later source of its path, nor any slot of another
            path; equal ones, such as padding, are not touched.
    Mutates: rows of every cache named by `dst`.
    """
    if src.numel() == 0:
        return
    for group in groups:
        _move_group(group, src, dst)


def _move_group(group: CacheGroup, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Do what `move_paths` does in the caches of a group."""
    first = as_bytes(group.caches[0])
    if not use_triton(first):
        move_paths_ref(group.caches, src, dst)
        return
    assert src.is_contiguous() and dst.is_contiguous()
    row = first.shape[1] * first.shape[2]
    count_launch("move_paths")
    _move_paths_kernel[(len(group.caches), src.shape[0])](
        group.addresses,
        src,
        dst,
        first,
        src.shape[1],
        ROW=row,
        BLOCK=triton.next_power_of_2(row),
        STEPS=triton.next_power_of_2(src.shape[1]),
        num_warps=4,
        **dependent_launch(first),
    )


def move_paths_ref(caches: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor) -> None:
    """Do what `move_paths` does in plain torch: all is read before any is written."""
    src, dst = src.flatten().long(), dst.flatten().long()
    for cache in caches:
        rows = as_bytes(cache)
        rows.index_copy_(0, dst, rows.index_select(0, src))
