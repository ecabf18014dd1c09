"""Answer orders with the trees that a step grew, the way that the orders came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draft_service.phases import DraftOutput
from draft_service.request import DraftRequest, PendingTree
from shared.messages import AnswerTimes, TokenTree, TreeBatch
from shared.peer.channel import PeerChannel
from shared.step.recorder import Recorder
from shared.step.step_timer import StepTimer

PATH_STAGE = "path"
"""Stage of an overlapped step in which the device waits for a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownTrees:
    """The trees of a step, on the host.

    Args:
        orders: That they answer.
        roots: Their root tokens.
        rows: Of these orders in `output`.
        timer: Of the step.
        is_overlapped: The device grew them before the host had the orders.
    """

    orders: Sequence[PendingTree]
    roots: Sequence[int]
    rows: Sequence[int]
    output: DraftOutput
    timer: StepTimer
    is_overlapped: bool = False


def settle_orders(
    requests: Sequence[DraftRequest],
    rows: Sequence[int],
    output: DraftOutput,
    timer: StepTimer,
    *,
    is_overlapped: bool = False,
) -> GrownTrees:
    """Return the answers to the pending orders of requests.

    Mutates: the requests, none of which has a pending order any more.
    """
    trees = GrownTrees(
        orders=[request.pending_tree for request in requests],
        roots=[request.tokens[-1] for request in requests],
        rows=rows,
        output=output,
        timer=timer,
        is_overlapped=is_overlapped,
    )
    for request in requests:
        request.pending = None
    return trees


def answer(
    trees: GrownTrees, outbox: list[Any], recorder: Recorder, *, num_targets: int = 0
) -> None:
    """Send every tree: over a channel at once, those of a channel in one message; or to the front.

    Args:
        outbox: Takes what goes to the front.
        num_targets: With requests of the draft's; 0: not known.
    """
    by_channel: dict[PeerChannel, list[int]] = {}
    for i, (_, channel) in enumerate(trees.orders):
        if channel is None:
            outbox.append(token_tree(trees, i, _times(trees, i, recorder)))
        else:
            by_channel.setdefault(channel, []).append(i)
    for channel, places in by_channel.items():
        times = _times_of(trees, places, recorder) if recorder.is_on else {}
        channel.put(tree_batch(trees, places, times, num_targets=num_targets))
        channel.flush()


def tree_batch(
    trees: GrownTrees,
    places: Sequence[int],
    times: Mapping[int, AnswerTimes],
    *,
    num_targets: int = 0,
) -> TreeBatch:
    """Return the trees of some requests as one message.

    Args:
        places: Of the orders in `trees`.
        times: Of timed requests, by their index in `places`.
    """
    rows = [trees.rows[i] for i in places]
    orders = [trees.orders[i].order for i in places]
    counts = trees.output.num_nodes.tolist()
    tokens, parents = trees.output.token_ids.tolist(), trees.output.parent_index.tolist()
    token_ids: list[int] = []
    parent_index: list[int] = []
    for place, row in zip(places, rows, strict=True):
        token_ids += (trees.roots[place], *tokens[row][: counts[row]])
        parent_index += (-1, *parents[row][: counts[row]])
    return TreeBatch(
        request_ids=[order.request_id for order in orders],
        target_epochs=[order.target_epoch for order in orders],
        draft_epochs=[order.draft_epoch for order in orders],
        round_idx=[order.round_idx for order in orders],
        seq_lens=[order.seq_len for order in orders],
        num_nodes=[counts[row] + 1 for row in rows],
        token_ids=token_ids,
        parent_index=parent_index,
        times=times,
        is_overlapped=trees.is_overlapped,
        num_targets=num_targets,
    )


def token_tree(trees: GrownTrees, place: int, times: AnswerTimes | None = None) -> TokenTree:
    """Return the tree of one request as a message to the orchestrator."""
    order, row, output = trees.orders[place].order, trees.rows[place], trees.output
    count = output.num_nodes[row]
    return TokenTree(
        request_id=order.request_id,
        target_epoch=order.target_epoch,
        draft_epoch=order.draft_epoch,
        round_idx=order.round_idx,
        seq_len=order.seq_len,
        token_ids=(trees.roots[place], *output.token_ids[row, :count].tolist()),
        parent_index=(-1, *output.parent_index[row, :count].tolist()),
        cumulative_logprobs=(0.0, *output.cumulative_logprobs[row, :count].tolist()),
        times=times,
    )


def _times_of(
    trees: GrownTrees, places: Sequence[int], recorder: Recorder
) -> dict[int, AnswerTimes]:
    """Return how the rounds of timed requests went, by their index in `places`."""
    times = enumerate(_times(trees, place, recorder) for place in places)
    return {i: each for i, each in times if each is not None}


def _times(trees: GrownTrees, place: int, recorder: Recorder) -> AnswerTimes | None:
    """Return how the round of a request went, from its order on; None: it is not timed."""
    order, timer = trees.orders[place].order, trees.timer
    key = order.request_id, order.round_idx
    if not recorder.has_begun(*key):
        return None
    stages = timer.stages()
    if trees.is_overlapped:
        # What the device waited for it had before the host had the order. Nor does the target's
        # device wait until the host has read the tree.
        begin = [stage.name for stage in stages].index(PATH_STAGE)
        recorder.begin(*key, stages[begin].end_ns)
        recorder.stages(*key, stages[begin + 1 : -1])
    else:
        recorder.stage_at_mark(*key, "features")
        recorder.stage(*key, "queue", timer.begin_ns)
        recorder.stages(*key, stages)
        recorder.stage(*key, "tree")
    return recorder.take(*key)
