"""Move K/V rows between slots of every layer; sources and destinations may overlap."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def move_kv(caches: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy slot src[m] to slot dst[m] in every cache, as if all were read before any is written.

    Args:
        caches: Each [num_slots, Hkv, d]; K and V of every layer.
        src: [M] i32.
        dst: [M] i32; padding is (0, 0), the sink; every other slot occurs once.
    Mutates: rows of every cache named by `dst`.
    """
    move_kv_ref(caches, src, dst)


def move_kv_ref(caches: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor) -> None:
    """Do what `move_kv` does in plain torch."""
    src, dst = src.long(), dst.long()
    for cache in caches:
        cache.index_copy_(0, dst, cache.index_select(0, src))
