"""Scatter this step's K/V rows into their slots."""

from __future__ import annotations

import torch


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
    store_kv_ref(k, v, k_cache, v_cache, slot_mapping)


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
