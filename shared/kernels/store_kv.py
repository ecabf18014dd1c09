"""Scatter this step's K/V rows into their slots. Grid: (num_tokens,)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS, count_launch, use_triton


@triton.jit
def _store_kv_kernel(
    k_ptr,  # [T, Hkv, d], rows k_stride apart
    v_ptr,  # [T, Hkv, d], rows v_stride apart
    k_cache_ptr,  # [num_slots, Hkv, d] mutated
    v_cache_ptr,  # [num_slots, Hkv, d] mutated
    slot_mapping_ptr,  # [T] i32
    k_stride,
    v_stride,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_row = column < ROW
    k = tl.load(k_ptr + token * k_stride + column, mask=in_row, other=0.0)
    v = tl.load(v_ptr + token * v_stride + column, mask=in_row, other=0.0)
    k = k.to(k_cache_ptr.dtype.element_ty)
    v = v.to(v_cache_ptr.dtype.element_ty)
    tl.store(k_cache_ptr + slot * ROW + column, k, mask=in_row)
    tl.store(v_cache_ptr + slot * ROW + column, v, mask=in_row)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write row t of k and v into slot slot_mapping[t].

    Args:
        k: [T, Hkv, d].
        v: [T, Hkv, d].
        k_cache: [num_slots, Hkv, d].
        v_cache: [num_slots, Hkv, d].
        slot_mapping: [T] i32; padding points into page 0, every other slot occurs once.
    Mutates: rows of `k_cache` and `v_cache` named by `slot_mapping`.
    """
    if not use_triton(k):
        store_kv_ref(k, v, k_cache, v_cache, slot_mapping)
        return
    assert k.shape == v.shape and k.shape[1:] == k_cache.shape[1:] == v_cache.shape[1:]
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    if k.shape[0] == 0:
        return
    k, v = _with_packed_rows(k), _with_packed_rows(v)
    row = k.shape[1] * k.shape[2]
    count_launch("store_kv")
    _store_kv_kernel[(k.shape[0],)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping.contiguous(),
        k.stride(0),
        v.stride(0),
        ROW=row,
        BLOCK=triton.next_power_of_2(row),
        num_warps=4,
        **LAUNCH_OPTIONS,
    )


def _with_packed_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return rows whose heads and values are dense; slices of a fused projection stay as they are.

    Args:
        rows: [T, Hkv, d].
    """
    is_packed = rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
    return rows if is_packed else rows.contiguous()


def store_kv_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Do what `store_kv` does in plain torch."""
    slots = slot_mapping.long()
    k_cache.index_copy_(0, slots, k.to(k_cache.dtype))
    v_cache.index_copy_(0, slots, v.to(v_cache.dtype))
