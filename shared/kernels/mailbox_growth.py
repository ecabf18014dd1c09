"""Let trees grow from the ends of paths that a device took from a mailbox (mailbox_paths.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton
from shared.kernels.mailbox_words import MAX_PATH

# Requests of a program.
_LANES = 32


@triton.jit(do_not_specialize=["num_reqs"])
def _advance_growth_kernel(
    taken_ptr,  # [R, 1 + MAX_PATH] i32
    kv_len_ptr,  # [R] i32 mutated
    node_position_ptr,  # [R] i64 mutated
    child_position_ptr,  # [R] i64 mutated
    req_idx_ptr,  # [R] i32 mutated
    topk_ptr,  # [R] i32 mutated
    num_steps_ptr,  # [R] i32 mutated
    num_nodes_ptr,  # [R] i32 mutated
    num_reqs,
    MAX_PATH: tl.constexpr,
    LANES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    request = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    is_req = request < num_reqs
    length = tl.load(taken_ptr + request * (1 + MAX_PATH), mask=is_req, other=0)
    is_none = is_req & (length == 0)
    kv_len = tl.load(kv_len_ptr + request, mask=is_req, other=0)
    tl.store(kv_len_ptr + request, tl.where(is_none, 0, kv_len + length), mask=is_req)
    node_position = tl.load(node_position_ptr + request, mask=is_req, other=0)
    tl.store(node_position_ptr + request, node_position + length, mask=is_req)
    child_position = tl.load(child_position_ptr + request, mask=is_req, other=0)
    tl.store(child_position_ptr + request, child_position + length, mask=is_req)
    tl.store(req_idx_ptr + request, 0, mask=is_none)
    tl.store(topk_ptr + request, 0, mask=is_none)
    tl.store(num_steps_ptr + request, 0, mask=is_none)
    tl.store(num_nodes_ptr + request, 0, mask=is_none)


def advance_growth(
    taken: torch.Tensor,
    kv_len: torch.Tensor,
    node_position: torch.Tensor,
    child_position: torch.Tensor,
    req_idx: torch.Tensor,
    topk: torch.Tensor,
    num_steps: torch.Tensor,
    num_nodes: torch.Tensor,
) -> None:
    """Let trees grow from the ends of the paths that `take_paths` took.

    Where there is no path, no request is left, as draft_service/growth.py has it.

    Args:
        taken: [R, 1 + MAX_PATH] i32, from `take_paths`.
        kv_len: [>= R] i32.
        node_position: [>= R] i64.
        child_position: [>= R] i64.
        req_idx: [>= R] i32, like the rest.
    Mutates: the first R of everything but `taken`.
    """
    if not use_triton(taken):
        advance_growth_ref(
            taken, kv_len, node_position, child_position, req_idx, topk, num_steps, num_nodes
        )
        return
    num_reqs = len(taken)
    if num_reqs == 0:
        return
    count_launch("advance_growth", is_single=True)
    _advance_growth_kernel[(triton.cdiv(num_reqs, _LANES),)](
        taken,
        kv_len,
        node_position,
        child_position,
        req_idx,
        topk,
        num_steps,
        num_nodes,
        num_reqs,
        MAX_PATH=MAX_PATH,
        LANES=_LANES,
        num_warps=1,
        **dependent_launch(taken),
    )


def advance_growth_ref(
    taken: torch.Tensor,
    kv_len: torch.Tensor,
    node_position: torch.Tensor,
    child_position: torch.Tensor,
    req_idx: torch.Tensor,
    topk: torch.Tensor,
    num_steps: torch.Tensor,
    num_nodes: torch.Tensor,
) -> None:
    """Do what `advance_growth` does in plain torch."""
    length = taken[:, 0]
    for field in (kv_len, node_position, child_position):
        field[: len(taken)] += length
    for field in (kv_len, req_idx, topk, num_steps, num_nodes):
        field[: len(taken)][length == 0] = 0
