"""Order (row, expert) pairs by expert, so that one expert's rows lie beside each other.

Every expert has a program that counts the pairs before its own, and lists its own. Grid:
(num_experts + 1,); the last one lists the pairs of padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton


@triton.jit(do_not_specialize=["num_pairs"])
def _order_pairs_kernel(
    ids_ptr,  # [P] i32
    pairs_ptr,  # [P] i32 mutated
    indptr_ptr,  # [E + 2] i32 mutated
    num_pairs,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    num_below = tl.zeros((BLOCK,), dtype=tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        pair = begin + lane
        is_below = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=expert) < expert
        num_below += is_below.to(tl.int32)
    place = tl.sum(num_below, axis=0)
    tl.store(indptr_ptr + expert, place)
    tl.store(indptr_ptr + expert + 1, num_pairs, mask=expert == tl.num_programs(0) - 1)
    for begin in range(0, num_pairs, BLOCK):
        pair = begin + lane
        is_own = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) == expert
        rank = tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(pairs_ptr + place + rank - 1, pair, mask=is_own)
        place += tl.max(rank, axis=0)


def order_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs of every expert.

    Args:
        ids: [T, count] i32, see ChosenExperts.
    Returns: pairs [T * count] i32, row * count + slot, those of expert 0 first, ascending; indptr
        [num_experts + 2] i32, where each expert's begin, last of all those of padding.
    """
    if not use_triton(ids):
        return order_pairs_ref(ids, num_experts)
    assert ids.is_contiguous() and ids.dtype == torch.int32
    pairs = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    indptr = torch.empty(num_experts + 2, dtype=torch.int32, device=ids.device)
    block = max(16, min(4096, triton.next_power_of_2(ids.numel())))
    count_launch("order_pairs")
    _order_pairs_kernel[(num_experts + 1,)](
        ids,
        pairs,
        indptr,
        ids.numel(),
        BLOCK=block,
        num_warps=1 if block <= 256 else 8,
        **dependent_launch(ids),
    )
    return pairs, indptr


def order_pairs_ref(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `order_pairs` does in plain torch."""
    flat = ids.flatten()
    pairs = flat.sort(stable=True).indices
    counts = torch.bincount(flat, minlength=num_experts + 1)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return pairs.to(torch.int32), indptr.to(torch.int32)
