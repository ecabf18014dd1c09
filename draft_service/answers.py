"""Answer orders with the trees that a step grew, the way that the orders came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from draft_service.front import Front
from draft_service.phases import DraftOutput
from draft_service.request import DraftRequest
from shared.messages import AnswerTimes, TokenTree, TreeBatch
from shared.peer.channel import PeerChannel
from shared.step.step_timer import StepTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownTrees:
    """The trees of a step, on the host.

    Args:
        requests: Whose pending orders are answered.
        rows: Of the requests in `output`.
        timer: Of the step.
        is_overlapped: The device grew them before the host had the orders.
    """

    requests: Sequence[DraftRequest]
    rows: Sequence[int]
    output: DraftOutput
    timer: StepTimer
    is_overlapped: bool = False


def answer(trees: GrownTrees, front: Front) -> None:
    """Send every tree: over a channel at once, those of a channel in one message; or to the front.

    Mutates: the requests, none of which has a pending order any more.
    """
    by_channel: dict[PeerChannel, list[int]] = {}
    for i, request in enumerate(trees.requests):
        channel = request.pending_tree.channel
        if channel is None:
            front.put(token_tree(trees, i))
        else:
            by_channel.setdefault(channel, []).append(i)
    for channel, places in by_channel.items():
        channel.put(tree_batch(trees, places))
        channel.flush()
    for request in trees.requests:
        request.pending = None


def tree_batch(trees: GrownTrees, places: Sequence[int]) -> TreeBatch:
    """Return the trees of some requests as one message.

    Args:
        places: Of the requests in `trees`.
    """
    requests = [trees.requests[i] for i in places]
    rows = [trees.rows[i] for i in places]
    pending = [request.pending_tree for request in requests]
    orders = [tree.order for tree in pending]
    output = trees.output
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
            i: _times(tree.times, request, trees.timer)
            for i, (tree, request) in enumerate(zip(pending, requests, strict=True))
            if tree.times is not None
        },
        is_ahead=trees.is_overlapped,
    )


def token_tree(trees: GrownTrees, place: int) -> TokenTree:
    """Return the tree of one request as a message to the orchestrator."""
    request, row, output = trees.requests[place], trees.rows[place], trees.output
    pending = request.pending_tree
    order, times = pending.order, pending.times
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
        times=None if times is None else _times(times, request, trees.timer),
        has_peer=request.channel is not None,
    )


def _times(times: AnswerTimes, request: DraftRequest, timer: StepTimer) -> AnswerTimes:
    """Return how a round of a timed request went, from its order on."""
    stages = timer.stages()
    for i, stage in enumerate(stages):
        if stage.name == "await":  # the device had what it waited for before the host had the order
            times = AnswerTimes(clock_id=times.clock_id, begin_ns=stage.end_ns)
            # Nor does the target's device wait until the host has read the tree.
            return replace(times, stages=stages[i + 1 : -1])
    received_ns = 0 if request.features is None else request.features.received_ns
    times = times.then("features", received_ns).then("queue", timer.begin_ns)
    times = replace(times, stages=(*times.stages, *stages))
    return times.then("tree", time.monotonic_ns())
