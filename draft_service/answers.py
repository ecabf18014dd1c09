"""Answer orders with the trees that a step grew: those of a channel in one message."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from draft_service.phases import DraftOutput
from draft_service.request import DraftRequest
from shared.messages import AnswerTimes, TokenTree, TreeBatch
from shared.step.step_timer import StepTimer


def tree_batch(
    requests: Sequence[DraftRequest],
    rows: Sequence[int],
    output: DraftOutput,
    timer: StepTimer,
    *,
    is_ahead: bool,
) -> TreeBatch:
    """Answer the pending rounds of some requests, over a channel.

    Args:
        rows: Of the requests in `output`.
        timer: Of the step.
        is_ahead: It began before the orders came.
    """
    orders = [request.pending_order for request in requests]
    counts = output.num_nodes.tolist()
    tokens, parents = output.token_ids.tolist(), output.parent_index.tolist()
    token_ids: list[int] = []
    parent_index: list[int] = []
    for request, row in zip(requests, rows, strict=True):
        count = counts[row]
        token_ids.append(request.tokens[-1])
        token_ids += tokens[row][:count]
        parent_index.append(-1)
        parent_index += parents[row][:count]
    return TreeBatch(
        request_ids=[order.request_id for order in orders],
        target_epochs=[order.target_epoch for order in orders],
        draft_epochs=[order.draft_epoch for order in orders],
        round_idx=[order.round_idx for order in orders],
        seq_lens=[order.seq_len for order in orders],
        num_nodes=[counts[row] + 1 for row in rows],
        token_ids=token_ids,
        parent_index=parent_index,
        times={
            i: _times(request.pending_times, request, timer)
            for i, request in enumerate(requests)
            if request.pending_times is not None
        },
        is_overlapped=is_ahead,
    )


def token_tree(request: DraftRequest, row: int, output: DraftOutput, timer: StepTimer) -> TokenTree:
    """Answer the pending round of a request, to the orchestrator."""
    order, times = request.pending_order, request.pending_times
    count = output.num_nodes[row]
    return TokenTree(
        request_id=order.request_id,
        target_epoch=order.target_epoch,
        draft_epoch=order.draft_epoch,
        round_idx=order.round_idx,
        seq_len=order.seq_len,
        token_ids=(request.tokens[-1], *output.token_ids[row, :count].tolist()),
        parent_index=(-1, *output.parent_index[row, :count].tolist()),
        cumulative_logprobs=(0.0, *output.cumulative_logprobs[row, :count].tolist()),
        times=None if times is None else _times(times, request, timer),
        has_peer=request.channel is not None,
    )


def _times(times: AnswerTimes, request: DraftRequest, timer: StepTimer) -> AnswerTimes:
    """Return how a round of a timed request went, from its order on."""
    stages = timer.stages()
    for i, stage in enumerate(stages):
        if stage.name == "await":  # what it waited for, the device was told before the host
            times = AnswerTimes(clock_id=times.clock_id, begin_ns=stage.end_ns)
            # Nor does the target's device wait until the host has read the tree.
            return replace(times, stages=stages[i + 1 : -1])
    times = times.then("features", request.features_ns).then("queue", timer.begin_ns)
    times = replace(times, stages=(*times.stages, *stages))
    return times.then("tree", time.monotonic_ns())
