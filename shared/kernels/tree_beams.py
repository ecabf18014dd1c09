"""Advance the beams of growing trees by one depth. Grid: (B,).

Cumulative scores of all children become candidates of the tree; the K best children of a request
are its next beams, and everything that their forward needs is written beside them. Candidate c of
a request:

    [0, K)                                   children of the root
    [K + (s - 1) K^2, K + s K^2)             children of the beams expanded at step s
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton
from shared.kernels.order_key import NO_KEY, best_keys, key_index, key_value, order_key
from shared.kernels.page_slots import slots_in, slots_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingTrees:
    """B requests whose trees grow, and where their rows go.

    Beam j of step s lies at logical slot kv_len + (s - 1) * topk + j, at position
    node_position + s - 1.

    Args:
        req_idx: [B] i32. Row of page_table.
        kv_len: [B] i32. Committed logical slots.
        node_position: [B] i64. Position id of a node of depth 1.
        topk: [B] i32, at most K; 0: padding.
        num_steps: [B] i32; 0: padding.
        page_table: [max_reqs, max_pages_per_req] i32 page ids.
        page_size: Slots per page.
    """

    req_idx: torch.Tensor
    kv_len: torch.Tensor
    node_position: torch.Tensor
    topk: torch.Tensor
    num_steps: torch.Tensor
    page_table: torch.Tensor
    page_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Everything that may enter the trees. [B, K + (S - 1) K^2] each.

    Args:
        score: f32, -inf: no such candidate.
        token: i32 target ids.
        parent: i32 candidate, -1 = the root.
    """

    score: torch.Tensor
    token: torch.Tensor
    parent: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, topk: int, num_steps: int, device: torch.device) -> Candidates:
        """Return memory for the candidates of S steps, all of which `next_beams` writes."""
        shape = (batch, topk + (num_steps - 1) * topk**2)
        return cls(
            score=torch.empty(shape, dtype=torch.float32, device=device),
            token=torch.empty(shape, dtype=torch.int32, device=device),
            parent=torch.empty(shape, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beams:
    """The nodes to expand next: B * K rows of a forward.

    Args:
        score: [B, K] f32, -inf: padding.
        candidate: [B, K] i32.
        token_ids: [B * K] i64 target ids.
        position_ids: [B * K] i64.
        parent_row: [B * K] i64. Row, in the forward before, of the parent; the first beams' is b.
        prefix_len: [B] i32.
        path_len: [B * K] i32.
        path_offset: [B * K, D] i32. As in TreeAttentionMetadata.
        slot_mapping: [B * K] i32.
    """

    score: torch.Tensor
    candidate: torch.Tensor
    token_ids: torch.Tensor
    position_ids: torch.Tensor
    parent_row: torch.Tensor
    prefix_len: torch.Tensor
    path_len: torch.Tensor
    path_offset: torch.Tensor
    slot_mapping: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, topk: int, depth: int, device: torch.device) -> Beams:
        """Return memory for K beams of B requests with paths of up to `depth` nodes."""

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        num_rows = batch * topk
        return cls(
            score=empty(batch, topk, dtype=torch.float32),
            candidate=empty(batch, topk),
            token_ids=empty(num_rows, dtype=torch.int64),
            position_ids=empty(num_rows, dtype=torch.int64),
            parent_row=empty(num_rows, dtype=torch.int64),
            prefix_len=empty(batch),
            path_len=empty(num_rows),
            path_offset=empty(num_rows, depth),
            slot_mapping=empty(num_rows),
        )


@triton.jit(do_not_specialize=["step", "num_candidates", "page_table_stride"])
def _next_beams_kernel(
    child_score_ptr,  # [B * P, K] f32
    child_token_ptr,  # [B * P, K] i32
    req_idx_ptr,  # [B] i32
    kv_len_ptr,  # [B] i32
    node_position_ptr,  # [B] i64
    topk_ptr,  # [B] i32
    num_steps_ptr,  # [B] i32
    page_table_ptr,  # [max_reqs, max_pages_per_req] i32
    beam_score_ptr,  # [B, K] f32, unread at the root, as all of these beams
    beam_candidate_ptr,  # [B, K] i32
    beam_path_ptr,  # [B * K, D] i32
    candidate_score_ptr,  # [B, C] f32 mutated
    candidate_token_ptr,  # [B, C] i32 mutated
    candidate_parent_ptr,  # [B, C] i32 mutated
    score_ptr,  # [B, K] f32 mutated
    candidate_ptr,  # [B, K] i32 mutated
    token_ids_ptr,  # [B * K] i64 mutated
    position_ids_ptr,  # [B * K] i64 mutated
    parent_row_ptr,  # [B * K] i64 mutated
    prefix_len_ptr,  # [B] i32 mutated
    path_len_ptr,  # [B * K] i32 mutated
    path_offset_ptr,  # [B * K, D] i32 mutated
    slot_mapping_ptr,  # [B * K] i32 mutated
    step,
    num_candidates,
    page_table_stride,
    IS_ROOT: tl.constexpr,
    IS_LAST: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CHILD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    PARENTS: tl.constexpr = 1 if IS_ROOT else WIDTH
    request = tl.program_id(0).to(tl.int64)
    topk = tl.load(topk_ptr + request)
    num_steps = tl.load(num_steps_ptr + request)
    kv_len = tl.load(kv_len_ptr + request)

    # Every child becomes a candidate.
    lane = tl.arange(0, CHILD_BLOCK)
    in_block = lane < PARENTS * WIDTH
    is_live = in_block & (lane % WIDTH < tl.where(step < num_steps, topk, 0))
    child = request * PARENTS * WIDTH + lane
    score = tl.load(child_score_ptr + child, mask=is_live, other=-float("inf"))
    token = tl.load(child_token_ptr + child, mask=is_live, other=0)
    parent = tl.full((CHILD_BLOCK,), -1, dtype=tl.int32)
    first = 0
    if not IS_ROOT:
        beam = request * WIDTH + lane // WIDTH
        score += tl.load(beam_score_ptr + beam, mask=in_block, other=-float("inf"))
        parent = tl.load(beam_candidate_ptr + beam, mask=in_block, other=-1)
        first = WIDTH + (step - 1) * WIDTH * WIDTH
    out = request * num_candidates + first + lane
    tl.store(candidate_score_ptr + out, score, mask=in_block)
    tl.store(candidate_token_ptr + out, token, mask=in_block)
    tl.store(candidate_parent_ptr + out, parent, mask=in_block)
    if IS_LAST:
        return

    # The best of them are expanded next.
    keys = tl.where(in_block, order_key(score, lane), NO_KEY)
    best = best_keys(keys, WIDTH, WIDTH_BLOCK)
    index = key_index(best)
    rank = tl.arange(0, WIDTH_BLOCK)
    in_beams = rank < WIDTH
    is_beam = rank < tl.where(step + 1 < num_steps, topk, 0)
    row = request * WIDTH + rank
    best_score = tl.where(is_beam, key_value(best), -float("inf"))
    tl.store(score_ptr + row, best_score, mask=in_beams)
    tl.store(candidate_ptr + row, (first + index).to(tl.int32), mask=in_beams)
    token = tl.load(child_token_ptr + request * PARENTS * WIDTH + index, mask=is_beam, other=0)
    tl.store(token_ids_ptr + row, token.to(tl.int64), mask=in_beams)
    position = tl.where(is_beam, tl.load(node_position_ptr + request) + step, 0)
    tl.store(position_ids_ptr + row, position, mask=in_beams)
    parent_beam = tl.where(is_beam, index // WIDTH, 0)
    tl.store(parent_row_ptr + row, request * PARENTS + parent_beam, mask=in_beams)
    tl.store(prefix_len_ptr + request, tl.where(step + 1 < num_steps, kv_len, 0))
    tl.store(path_len_ptr + row, tl.where(is_beam, step + 1, 1), mask=in_beams)

    own = step * topk + rank
    pages_ptr = page_table_ptr + tl.load(req_idx_ptr + request).to(tl.int64) * page_table_stride
    slot = slots_of(pages_ptr, kv_len + own, PAGE_SIZE, is_beam)
    tl.store(slot_mapping_ptr + row, tl.where(is_beam, slot, 0), mask=in_beams)

    level = tl.arange(0, DEPTH_BLOCK)[None, :]
    path = tl.where((level == step) & is_beam[:, None], own[:, None], 0)
    if not IS_ROOT:
        above_ptr = beam_path_ptr + (request * WIDTH + parent_beam)[:, None] * DEPTH + level
        path += tl.load(above_ptr, mask=is_beam[:, None] & (level < step), other=0)
    path_ptr = path_offset_ptr + row[:, None] * DEPTH + level
    tl.store(path_ptr, path, mask=in_beams[:, None] & (level < DEPTH))


def next_beams(
    trees: GrowingTrees,
    candidates: Candidates,
    beams: Beams | None,
    child_score: torch.Tensor,
    child_token: torch.Tensor,
    *,
    step: int,
    most_steps: int,
) -> Beams | None:
    """Record the children of the beams of one step, and choose the beams of the next.

    Args:
        beams: Those expanded at this step, of whom the children are; None: the root.
        child_score: [B * P, K] f32 log-probabilities, best first; P = 1 for the root, else K.
        child_token: [B * P, K] i32 target ids.
        step: Depth of the parents, 0 for the root.
        most_steps: S, the largest num_steps.
    Returns: The next beams, padded as growth.py says, ties broken by the lower candidate; None at
        the last step.
    Mutates: the block of `candidates` that belongs to the step.
    """
    if not use_triton(child_score):
        return next_beams_ref(
            trees, candidates, beams, child_score, child_token, step=step, most_steps=most_steps
        )
    batch, width = trees.topk.shape[0], child_score.shape[1]
    assert (beams is None) == (step == 0)
    assert child_score.shape[0] == batch * (1 if beams is None else width)
    is_last = step + 1 == most_steps
    depth = 1 if is_last else most_steps - 1
    out = Beams.allocate(0 if is_last else batch, width, depth, child_score.device)
    before = out if beams is None else beams
    count_launch("next_beams")
    _next_beams_kernel[(batch,)](
        child_score,
        child_token,
        trees.req_idx,
        trees.kv_len,
        trees.node_position,
        trees.topk,
        trees.num_steps,
        trees.page_table,
        before.score,
        before.candidate,
        before.path_offset,
        candidates.score,
        candidates.token,
        candidates.parent,
        out.score,
        out.candidate,
        out.token_ids,
        out.position_ids,
        out.parent_row,
        out.prefix_len,
        out.path_len,
        out.path_offset,
        out.slot_mapping,
        step,
        candidates.score.shape[1],
        trees.page_table.stride(0),
        IS_ROOT=beams is None,
        IS_LAST=is_last,
        WIDTH=width,
        DEPTH=depth,
        PAGE_SIZE=trees.page_size,
        CHILD_BLOCK=triton.next_power_of_2(width if beams is None else width * width),
        WIDTH_BLOCK=triton.next_power_of_2(width),
        DEPTH_BLOCK=triton.next_power_of_2(depth),
        num_warps=1,
        **dependent_launch(child_score),
    )
    return None if is_last else out


def next_beams_ref(
    trees: GrowingTrees,
    candidates: Candidates,
    beams: Beams | None,
    child_score: torch.Tensor,
    child_token: torch.Tensor,
    *,
    step: int,
    most_steps: int,
) -> Beams | None:
    """Do what `next_beams` does in plain torch."""
    batch, width = trees.topk.shape[0], child_score.shape[1]
    device = child_score.device
    topk, num_steps = trees.topk.unsqueeze(1), trees.num_steps.unsqueeze(1)  # [B, 1]
    rank = torch.arange(width, dtype=torch.int32, device=device)
    is_live = rank < torch.where(step < num_steps, topk, 0)  # [B, K]
    score = torch.where(is_live.unsqueeze(1), child_score.view(batch, -1, width), -torch.inf)
    num_parents = score.shape[1]
    token = child_token.view(batch, -1)
    first = 0
    if beams is not None:
        score = score + beams.score.unsqueeze(2)
        first = width + (step - 1) * width**2
    score = score.flatten(1)  # [B, P * K]
    block = slice(first, first + score.shape[1])
    candidates.score[:, block] = score
    candidates.token[:, block] = token
    candidates.parent[:, block] = (
        -1 if beams is None else beams.candidate.repeat_interleave(width, dim=1)
    )
    if step + 1 == most_steps:
        return None

    if num_parents == 1:  # in order already
        best, index = score, rank.long().expand(batch, width)
    else:
        best, index = score.sort(dim=1, descending=True, stable=True)
        best, index = best[:, :width], index[:, :width]
    remaining = torch.where(step + 1 < num_steps, topk, 0)
    is_beam = rank < remaining
    parent = torch.where(is_beam, index // width, 0)  # [B, K]
    own = step * topk + rank
    logical = torch.where(is_beam, trees.kv_len.unsqueeze(1) + own, 0)
    slot = slots_in(trees.page_table, trees.req_idx.unsqueeze(1), logical, trees.page_size)
    path = torch.zeros((batch, width, most_steps - 1), dtype=torch.int32, device=device)
    if beams is not None:
        above = beams.path_offset.view(path.shape)
        path = above.gather(1, parent.unsqueeze(2).expand(path.shape))
    path[:, :, step] = own
    path *= is_beam.unsqueeze(2)
    first_row = torch.arange(0, batch * num_parents, num_parents, device=device).unsqueeze(1)
    position = trees.node_position.unsqueeze(1) + step
    return Beams(
        score=torch.where(is_beam, best, -torch.inf),
        candidate=(first + index).int(),
        token_ids=torch.where(is_beam, token.gather(1, index), 0).long().flatten(),
        position_ids=torch.where(is_beam, position, 0).flatten(),
        parent_row=(first_row + parent).flatten(),
        prefix_len=torch.where(remaining.squeeze(1) > 0, trees.kv_len, 0),
        path_len=torch.where(is_beam, step + 1, 1).int().flatten(),
        path_offset=path.flatten(0, 1),
        slot_mapping=torch.where(is_beam, slot, 0).flatten(),
    )
