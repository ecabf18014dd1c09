"""Walk each verified tree along the target's own tokens, and say what that path moves and reads.

Grid: (num_requests,), one warp each: a tree has at most 64 nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton
from shared.kernels.page_slots import slots_in, slots_of

# Most nodes of a tree, root included.
NODES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptWalk:
    """Where each request's path went. B requests, D = depth of the deepest tree.

    Args:
        accept_index: [B, D + 1] i64, nodes of the path, root first; -1 past its end.
        accept_length: [B] i64, tokens committed, bonus INCLUDED (= nodes of the path).
        path_rows: [B, D + 1] i64, logit rows of the path's nodes; the root's past its end.
        move_src: [B, D + 1] i32, slot of each path node's KV; 0 where it is in place already.
        move_dst: [B, D + 1] i32, slot where it belongs; 0 likewise.
    """

    accept_index: torch.Tensor
    accept_length: torch.Tensor
    path_rows: torch.Tensor
    move_src: torch.Tensor
    move_dst: torch.Tensor


@triton.jit(do_not_specialize=["num_nodes", "num_steps"])
def _accept_walk_kernel(
    token_ptr,  # [B, N] i64
    parent_ptr,  # [B, N] i64
    row_ptr,  # [B, N] i64
    predict_ptr,  # [L] i32
    seq_len_ptr,  # [B] i64
    req_idx_ptr,  # [B] i64
    page_table_ptr,  # [max_reqs, max_pages_per_req] i32
    accept_index_ptr,  # [B, D + 1] i64 mutated
    accept_length_ptr,  # [B] i64 mutated
    path_rows_ptr,  # [B, D + 1] i64 mutated
    move_src_ptr,  # [B, D + 1] i32 mutated
    move_dst_ptr,  # [B, D + 1] i32 mutated
    roots_ptr,  # [>= max_reqs] i64 mutated
    newest_slot_ptr,  # [>= max_reqs] i64 mutated
    num_nodes,
    num_steps,  # D + 1
    table_stride,
    PAGE_SIZE: tl.constexpr,
    NODES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    is_node = node < num_nodes
    at = request * num_nodes + node
    token = tl.load(token_ptr + at, mask=is_node, other=-1)
    parent = tl.load(parent_ptr + at, mask=is_node, other=-2)
    row = tl.load(row_ptr + at, mask=is_node, other=0)
    predict = tl.load(predict_ptr + row, mask=is_node, other=-1).to(tl.int64)

    step = tl.arange(0, NODES)
    path = tl.where(step == 0, 0, -1)
    path_row = tl.zeros((NODES,), dtype=tl.int64) + tl.sum(tl.where(node == 0, row, 0), axis=0)
    current = tl.zeros((), dtype=tl.int32)
    length = 1
    is_alive = num_steps > 1
    while is_alive:
        wanted = tl.sum(tl.where(node == current, predict, 0), axis=0)
        is_child = (parent == current) & (token == wanted) & is_node
        # First such child: siblings are distinct, and a malformed tree must not matter.
        child = tl.min(tl.where(is_child, node, NODES), axis=0)
        is_alive = child < NODES
        if is_alive:
            current = child
            path = tl.where(step == length, child, path)
            child_row = tl.sum(tl.where(node == child, row, 0), axis=0)
            path_row = tl.where(step == length, child_row, path_row)
            length += 1
            is_alive = length < num_steps

    is_step = step < num_steps
    out = request * num_steps + step
    tl.store(accept_index_ptr + out, path.to(tl.int64), mask=is_step)
    tl.store(path_rows_ptr + out, path_row, mask=is_step)
    tl.store(accept_length_ptr + request, length)

    req_idx = tl.load(req_idx_ptr + request)
    bonus = tl.sum(tl.where(node == current, predict, 0), axis=0)
    tl.store(roots_ptr + req_idx, bonus)
    seq_len = tl.load(seq_len_ptr + request)
    tl.store(newest_slot_ptr + req_idx, seq_len + length)

    # A path ascends, so a node is in place or moves forward.
    is_moved = path > step
    pages_ptr = page_table_ptr + req_idx * table_stride
    src = slots_of(pages_ptr, seq_len + path, PAGE_SIZE, is_moved)
    dst = slots_of(pages_ptr, seq_len + step, PAGE_SIZE, is_moved)
    tl.store(move_src_ptr + out, tl.where(is_moved, src, 0).to(tl.int32), mask=is_step)
    tl.store(move_dst_ptr + out, tl.where(is_moved, dst, 0).to(tl.int32), mask=is_step)


def accept_walk(
    token_ids: torch.Tensor,
    parent_index: torch.Tensor,
    node_rows: torch.Tensor,
    target_predict: torch.Tensor,
    seq_len: torch.Tensor,
    req_idx: torch.Tensor,
    page_table: torch.Tensor,
    roots: torch.Tensor,
    newest_slot: torch.Tensor,
    *,
    page_size: int,
    max_depth: int,
) -> AcceptWalk:
    """Follow, from the root, the child whose token the target sampled at its parent.

    Args:
        token_ids: [B, N] i64, root included, N <= 64; padding nodes have parent -2.
        parent_index: [B, N] i64, topological, root = -1.
        node_rows: [B, N] i64, logit row of each node; padding nodes point at row 0.
        target_predict: [L] i32, the target's token at each logit row.
        seq_len: [B] i64, logical slot of each root.
        req_idx: [B] i64, rows of the page table; of a padding tree, whose nodes are all padding, a
            row of `roots` that no request has.
        page_table: [max_reqs, max_pages_per_req] i32.
        roots: [>= max_reqs] i64, the newest token of every request.
        newest_slot: [>= max_reqs] i64, its logical slot.
        max_depth: Depth of the deepest tree; bounds the walk.
    Returns: AcceptWalk. No host-device sync.
    Mutates: `roots` and `newest_slot` of these requests: the bonus token, which ends the path.
    Source: arXiv:2305.09781 (tree verification), greedy walk over sampled tokens.
    """
    if not use_triton(token_ids):
        return accept_walk_ref(
            *(token_ids, parent_index, node_rows, target_predict, seq_len, req_idx),
            *(page_table, roots, newest_slot),
            page_size=page_size,
            max_depth=max_depth,
        )
    batch, num_nodes = token_ids.shape
    assert num_nodes <= NODES and max_depth < NODES
    assert page_table.stride(1) == 1 and page_table.dtype == torch.int32
    shape = (batch, max_depth + 1)
    device = token_ids.device
    walk = AcceptWalk(
        accept_index=torch.empty(shape, dtype=torch.int64, device=device),
        accept_length=torch.empty(batch, dtype=torch.int64, device=device),
        path_rows=torch.empty(shape, dtype=torch.int64, device=device),
        move_src=torch.empty(shape, dtype=torch.int32, device=device),
        move_dst=torch.empty(shape, dtype=torch.int32, device=device),
    )
    count_launch("accept_walk")
    _accept_walk_kernel[(batch,)](
        token_ids.contiguous(),
        parent_index.contiguous(),
        node_rows.contiguous(),
        target_predict.contiguous(),
        seq_len.contiguous(),
        req_idx.contiguous(),
        page_table,
        walk.accept_index,
        walk.accept_length,
        walk.path_rows,
        walk.move_src,
        walk.move_dst,
        roots,
        newest_slot,
        num_nodes,
        max_depth + 1,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        NODES=NODES,
        num_warps=1,
        **dependent_launch(token_ids),
    )
    return walk


def accept_walk_ref(
    token_ids: torch.Tensor,
    parent_index: torch.Tensor,
    node_rows: torch.Tensor,
    target_predict: torch.Tensor,
    seq_len: torch.Tensor,
    req_idx: torch.Tensor,
    page_table: torch.Tensor,
    roots: torch.Tensor,
    newest_slot: torch.Tensor,
    *,
    page_size: int,
    max_depth: int,
) -> AcceptWalk:
    """Do what `accept_walk` does in plain torch."""
    batch = token_ids.shape[0]
    predict = target_predict.long()[node_rows]  # [B, N]
    current = torch.zeros(batch, 1, dtype=torch.int64, device=token_ids.device)
    is_alive = torch.ones(batch, 1, dtype=torch.bool, device=token_ids.device)
    steps = [current]
    for _ in range(max_depth):
        wanted = predict.gather(1, current)  # [B, 1]
        is_child = (parent_index == current) & (token_ids == wanted) & is_alive  # [B, N]
        found, child = is_child.to(torch.int8).max(dim=1, keepdim=True)  # the first such child
        is_alive = found.bool()
        current = torch.where(is_alive, child, current)
        steps.append(torch.where(is_alive, child, -1))
    roots.index_copy_(0, req_idx, predict.gather(1, current).squeeze(1))
    node = torch.cat(steps, dim=1)  # [B, D + 1]
    accept_length = (node >= 0).sum(dim=1)
    newest_slot.index_copy_(0, req_idx, seq_len + accept_length)

    step = torch.arange(max_depth + 1, device=node.device).expand_as(node)

    def slot(offset: torch.Tensor) -> torch.Tensor:
        logical = torch.where(node > step, seq_len.unsqueeze(1) + offset, 0)
        rows = req_idx.clamp(max=len(page_table) - 1)  # padding has no row, and does not move
        slots = slots_in(page_table, rows.unsqueeze(1), logical, page_size)
        return torch.where(node > step, slots, 0).to(torch.int32)

    return AcceptWalk(
        accept_index=node,
        accept_length=accept_length,
        path_rows=node_rows.gather(1, node.clamp(min=0)),
        move_src=slot(node),
        move_dst=slot(step),
    )
