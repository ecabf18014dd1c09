"""Which experts a token's rows go to, and with what weights, from the logits of a router.

A row's experts are its best ones, ties by lower id, and stand in order of their ids: the order in
which their outputs are added. Rows of padding have none. Grid: (num_rows,).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shared.kernels.dependent_launch import dependent_launch, wait_for_previous
from shared.kernels.dispatch import count_launch, use_triton
from shared.kernels.linear import sum_addends_block, sum_addends_ref
from shared.kernels.vector_math import settle_vector_math

# Scores below all others, so that a row of NaN chooses experts that exist: of NaN, and of experts
# in groups that are not chosen from.
_SCORE_OF_NAN, _SCORE_OF_OTHERS = -1e30, -3e38
_TINY = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRule:
    """How experts are chosen.

    Args:
        count: Experts of a row.
        is_sigmoid: Scores are sigmoids of logits, else their softmax.
        is_of_chosen: The best logits are chosen, bias included, and the softmax is over these
            alone (gpt-oss); then `is_normalised`.
        is_normalised: Weights are divided by their sum.
        scaling_factor: What weights are then multiplied by.
        num_groups: Groups of neighbouring experts; they divide their number.
        num_chosen_groups: Groups that experts are chosen from.
        judges_by_two: A group is judged by the sum of its two best scores, else by its best.
    """

    count: int
    is_sigmoid: bool = False
    is_of_chosen: bool = False
    is_normalised: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    judges_by_two: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenExperts:
    """The experts of rows.

    Args:
        ids: [T, count] i32, ascending; the number of experts in rows of padding.
        weights: [T, count] f32; 0 in rows of padding.
    """

    ids: torch.Tensor
    weights: torch.Tensor


@triton.jit
def _best_groups(
    choice,  # [BLOCK] f32
    expert,  # [BLOCK] i32
    is_expert,  # [BLOCK] i1
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    JUDGES_BY_TWO: tl.constexpr,
):
    """Return which experts are in the best groups, ties by lower group. [BLOCK] i1."""
    lowest = -float("inf")
    group = expert // GROUP_SIZE
    column = tl.arange(0, GROUP_BLOCK)
    group_score = tl.full(column.shape, lowest, tl.float32)
    for i in tl.static_range(NUM_GROUPS):
        members = tl.where((group == i) & is_expert, choice, lowest)
        score, first = tl.max(members, axis=0, return_indices=True)
        if JUDGES_BY_TWO:
            score += tl.max(tl.where(expert == first, lowest, members), axis=0)
        group_score = tl.where(column == i, score, group_score)
    is_open = expert < 0
    for _ in tl.static_range(NUM_CHOSEN_GROUPS):
        _, first = tl.max(group_score, axis=0, return_indices=True)
        is_open = is_open | (group == first)
        group_score = tl.where(column == first, lowest, group_score)
    return is_open


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def _choose_experts_kernel(
    logits_ptr,  # [S, T, E] f32
    bias_ptr,  # [E] f32, unread unless HAS_BIAS
    scales_ptr,  # [E] f32, unread unless HAS_SCALES
    row_indptr_ptr,  # [R + 1] i32; the last one is the number of rows without padding
    ids_ptr,  # [T, COUNT] i32 mutated
    weights_ptr,  # [T, COUNT] f32 mutated
    num_rows,
    num_requests,
    scaling_factor,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    COUNT: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_OF_CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    JUDGES_BY_TWO: tl.constexpr,
    SCORE_OF_NAN: tl.constexpr,
    SCORE_OF_OTHERS: tl.constexpr,
    TINY: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    is_expert = expert < NUM_EXPERTS
    lowest = -float("inf")
    logits = sum_addends_block(
        logits_ptr,
        row * NUM_EXPERTS + expert,
        num_rows.to(tl.int64) * NUM_EXPERTS,
        is_expert,
        NUM_SPLITS,
    )
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    if IS_SIGMOID:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
        choice = scores
    elif IS_OF_CHOSEN:
        if HAS_BIAS:
            logits += bias
        logits = tl.where(is_expert, logits, lowest)
        scores = tl.exp(logits - tl.max(logits, axis=0))  # to be divided by the sum of the chosen
        choice = logits
    else:
        logits = tl.where(is_expert, logits, lowest)
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = tl.div_rn(powers, tl.sum(powers, axis=0))
        choice = scores
    if HAS_BIAS and not IS_OF_CHOSEN:
        choice += bias
    choice = tl.where(choice == choice, choice, SCORE_OF_NAN)
    if NUM_GROUPS > 1:
        is_open = _best_groups(
            choice,
            expert,
            is_expert,
            NUM_EXPERTS // NUM_GROUPS,
            NUM_GROUPS,
            GROUP_BLOCK,
            NUM_CHOSEN_GROUPS,
            JUDGES_BY_TWO,
        )
        choice = tl.where(is_open, choice, SCORE_OF_OTHERS)
    left = tl.where(is_expert, choice, lowest)
    is_chosen = expert < 0
    for _ in tl.static_range(COUNT):
        _, first = tl.max(left, axis=0, return_indices=True)  # of equal ones the lowest
        is_chosen = is_chosen | (expert == first)
        left = tl.where(expert == first, lowest, left)
    weights = scores
    if IS_NORMALISED:
        weights = tl.div_rn(scores, tl.sum(tl.where(is_chosen, scores, 0.0), axis=0) + TINY)
    weights *= scaling_factor
    if HAS_SCALES:
        weights *= tl.load(scales_ptr + expert, mask=is_expert, other=0.0)
    is_live = row < tl.load(row_indptr_ptr + num_requests)
    place = row * COUNT + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(ids_ptr + place, tl.where(is_live, expert, NUM_EXPERTS), mask=is_chosen)
    tl.store(weights_ptr + place, tl.where(is_live, weights, 0.0), mask=is_chosen)


def choose_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    row_indptr: torch.Tensor,
    rule: ChoiceRule,
    ids: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> ChosenExperts:
    """Choose the experts of every row; a row's depend on its logits alone.

    Args:
        logits: [S, T, E] f32, see `linear_addends`.
        bias: [E] f32, added to scores for the choice alone, or to logits if the rule is so; None:
            there is none.
        row_indptr: [R + 1] i32, whose last value is the number of rows without padding.
        ids: [T, count] i32, where the ids are left; None: in memory of their own.
        scales: [E] f32, what the weight of each expert is multiplied by in the end; None: nothing.
    Mutates: `ids`.
    Source: arXiv:2412.19437 for groups and bias.
    """
    assert bias is None or bias.dtype == torch.float32
    assert scales is None or scales.dtype == torch.float32
    assert rule.is_normalised or not rule.is_of_chosen
    if not use_triton(logits):
        return choose_experts_ref(logits, bias, row_indptr, rule, ids, scales)
    splits, num_rows, num_experts = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32
    assert row_indptr.is_contiguous() and num_experts % rule.num_groups == 0
    if ids is None:
        ids = torch.empty((num_rows, rule.count), dtype=torch.int32, device=logits.device)
    assert ids.shape == (num_rows, rule.count) and ids.is_contiguous() and ids.dtype == torch.int32
    weights = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return ChosenExperts(ids=ids, weights=weights)
    block = triton.next_power_of_2(num_experts)
    count_launch("choose_experts")
    _choose_experts_kernel[(num_rows,)](
        logits,
        logits if bias is None else bias,
        logits if scales is None else scales,
        row_indptr,
        ids,
        weights,
        num_rows,
        len(row_indptr) - 1,
        rule.scaling_factor,
        NUM_EXPERTS=num_experts,
        BLOCK=block,
        NUM_SPLITS=splits,
        COUNT=rule.count,
        IS_SIGMOID=rule.is_sigmoid,
        IS_OF_CHOSEN=rule.is_of_chosen,
        HAS_BIAS=bias is not None,
        HAS_SCALES=scales is not None,
        IS_NORMALISED=rule.is_normalised,
        NUM_GROUPS=rule.num_groups,
        GROUP_BLOCK=triton.next_power_of_2(rule.num_groups),
        NUM_CHOSEN_GROUPS=rule.num_chosen_groups,
        JUDGES_BY_TWO=rule.judges_by_two,
        SCORE_OF_NAN=_SCORE_OF_NAN,
        SCORE_OF_OTHERS=_SCORE_OF_OTHERS,
        TINY=_TINY,
        num_warps=1 if block <= 256 else 4,
        **dependent_launch(logits),
    )
    return ChosenExperts(ids=ids, weights=weights)


def choose_experts_ref(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    row_indptr: torch.Tensor,
    rule: ChoiceRule,
    ids: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> ChosenExperts:
    """Do what `choose_experts` does in plain torch."""
    settle_vector_math()
    values = sum_addends_ref(logits, None, torch.float32)
    num_rows, num_experts = values.shape
    if rule.is_of_chosen and bias is not None:
        values, bias = values + bias, None
    scores = _scores(values, rule)
    choice = values if rule.is_of_chosen else scores
    choice = choice if bias is None else choice + bias
    choice = choice.nan_to_num(nan=_SCORE_OF_NAN)
    if rule.num_groups > 1:
        groups = choice.view(num_rows, rule.num_groups, -1)
        judged = groups.topk(2 if rule.judges_by_two else 1, dim=2).values.sum(dim=2)
        best = judged.sort(dim=1, descending=True, stable=True).indices[:, : rule.num_chosen_groups]
        is_open = torch.zeros_like(judged, dtype=torch.bool).scatter(1, best, value=True)
        choice = groups.masked_fill(~is_open[:, :, None], _SCORE_OF_OTHERS).view_as(choice)
    order = choice.sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, : rule.count].sort(dim=1).values
    weights = scores.gather(1, chosen)
    if rule.is_normalised:
        total = weights[:, 0]
        for slot in range(1, rule.count):
            total = total + weights[:, slot]
        weights = weights / (total + _TINY)[:, None]
    weights = weights * rule.scaling_factor
    if scales is not None:
        weights = weights * scales[chosen]
    is_padding = torch.arange(num_rows, device=chosen.device) >= row_indptr[-1]
    chosen = chosen.masked_fill(is_padding[:, None], num_experts).to(torch.int32)
    weights = weights.masked_fill(is_padding[:, None], 0.0)
    return ChosenExperts(ids=chosen if ids is None else ids.copy_(chosen), weights=weights)


def _scores(logits: torch.Tensor, rule: ChoiceRule) -> torch.Tensor:
    """Return what is weighed: of chosen experts alone still to be divided by the sum of these."""
    if rule.is_sigmoid:
        return 1 / (1 + torch.exp(-logits))
    powers = torch.exp(logits - logits.amax(dim=1, keepdim=True))
    return powers if rule.is_of_chosen else powers / powers.sum(dim=1, keepdim=True)
