"""Keep the best candidates of every tree, in candidate order, and renumber their parents.

Grid: (B,). The kernel does not sort: it bisects over keys of (score, lower candidate) for the least
one that is kept. A parent has a smaller candidate index and at least its child's score, so the
selection is closed under ancestors, also for ties.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton
from shared.kernels.order_key import NO_KEY, order_key
from shared.kernels.tree_beams import Candidates


@triton.jit(do_not_specialize=["num_candidates", "most_nodes"])
def _select_nodes_kernel(
    score_ptr,  # [B, C] f32
    token_ptr,  # [B, C] i32
    parent_ptr,  # [B, C] i32
    num_nodes_ptr,  # [B] i32
    out_ptr,  # [B, 1 + 3 M] i32 mutated
    num_candidates,
    most_nodes,
    BLOCK: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    num_wanted = tl.load(num_nodes_ptr + request)
    lane = tl.arange(0, BLOCK)
    in_row = lane < num_candidates
    begin = request * num_candidates
    score = tl.load(score_ptr + begin + lane, mask=in_row, other=-float("inf"))
    token = tl.load(token_ptr + begin + lane, mask=in_row, other=0)
    parent = tl.load(parent_ptr + begin + lane, mask=in_row, other=-1)

    # The largest key from which on as many are left as are wanted.
    keys = tl.where(in_row, order_key(score, lane), NO_KEY)
    low = tl.full((), NO_KEY, dtype=tl.int64)  # from here on there are enough, or all
    high = tl.max(keys, axis=0) + 1  # from here on there are none
    while low + 1 < high:
        middle = low + (high - low) // 2
        is_enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= num_wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    least = tl.where(num_wanted > 0, low, high)
    is_node = (keys >= least) & (score > -float("inf"))

    node = tl.cumsum(is_node.to(tl.int32), axis=0)  # its number, the root is 0
    num_nodes = tl.sum(is_node.to(tl.int32), axis=0)
    parent_node = tl.gather(node, tl.maximum(parent, 0), axis=0)
    parent_node = tl.where(parent < 0, 0, parent_node)
    row_ptr = out_ptr + request * (1 + 3 * most_nodes)
    tl.store(row_ptr, num_nodes)
    tl.store(row_ptr + node, token, mask=is_node)
    tl.store(row_ptr + most_nodes + node, parent_node, mask=is_node)
    tl.store(row_ptr + 2 * most_nodes + node, score.to(tl.int32, bitcast=True), mask=is_node)
    rest = tl.arange(0, NODE_BLOCK)
    is_rest = (rest >= num_nodes) & (rest < most_nodes)
    for field in tl.static_range(3):
        tl.store(row_ptr + 1 + field * most_nodes + rest, 0, mask=is_rest)


def select_nodes(
    candidates: Candidates, num_nodes: torch.Tensor, *, most_nodes: int
) -> torch.Tensor:
    """Return the best candidates of every tree, packed for one copy to the host.

    Args:
        num_nodes: [B] i32, nodes wanted, the root excluded; 0: padding.
        most_nodes: M, at least the largest of num_nodes.
    Returns: [B, 1 + 3 M] i32: how many there are, root excluded, then their target ids, their
        parents (node numbers; the root is 0, the first of these nodes 1) and the bits of their
        scores; 0 past the last node.
    """
    if not use_triton(candidates.score):
        return select_nodes_ref(candidates, num_nodes, most_nodes=most_nodes)
    batch, total = candidates.score.shape
    out = torch.empty((batch, 1 + 3 * most_nodes), dtype=torch.int32, device=num_nodes.device)
    block = triton.next_power_of_2(total)
    count_launch("select_nodes")
    _select_nodes_kernel[(batch,)](
        candidates.score,
        candidates.token,
        candidates.parent,
        num_nodes,
        out,
        total,
        most_nodes,
        BLOCK=block,
        NODE_BLOCK=triton.next_power_of_2(most_nodes),
        num_warps=1 if block <= 256 else 4 if block <= 1024 else 8,
        **dependent_launch(candidates.score),
    )
    return out


def select_nodes_ref(
    candidates: Candidates, num_nodes: torch.Tensor, *, most_nodes: int
) -> torch.Tensor:
    """Do what `select_nodes` does in plain torch."""
    batch, total = candidates.score.shape
    device = candidates.score.device
    most = min(most_nodes, total)
    best, index = candidates.score.sort(dim=1, descending=True, stable=True)
    best, index = best[:, :most], index[:, :most]
    rank = torch.arange(most, device=device)
    is_node = (rank < num_nodes[:, None]) & (best > -torch.inf)  # [B, most]
    node, _ = torch.where(is_node, index, total).sort(dim=1)  # padding last
    is_node = node < total
    safe = node.clamp(max=total - 1)

    number = torch.zeros((batch, total + 1), dtype=torch.int32, device=device)
    number.scatter_(1, node, (rank + 1).int().expand(batch, most))
    parent = candidates.parent.gather(1, safe)
    parent = torch.where(parent < 0, 0, number.gather(1, parent.clamp(min=0).long()))
    out = torch.zeros((batch, 1 + 3 * most_nodes), dtype=torch.int32, device=device)
    out[:, 0] = is_node.sum(dim=1)
    fields = (candidates.token.gather(1, safe), parent, candidates.score.gather(1, safe))
    for i, field in enumerate(fields):
        begin = 1 + i * most_nodes
        out[:, begin : begin + most] = torch.where(is_node, field, 0).view(torch.int32)
    return out
