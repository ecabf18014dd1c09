"""Rounds whose trees the target orders itself, of drafts whose engines are attached to it.

The orchestrator grants them, hears of every path, and orders a round itself when one of these does
not come: whatever is lost here costs a round its tree, or a wait, and no token.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence

from shared.errors import InvalidTreeError
from shared.kernels.mailbox_words import MAX_PATH
from shared.messages import (
    AnswerTimes,
    DraftRound,
    PathBatch,
    PathEntry,
    PeerAttach,
    PeerTree,
    PeerTrees,
    RingRows,
    TreeBatch,
    TreeShape,
    WorkerInfo,
)
from shared.peer.channel import PeerChannel
from shared.peer.mailbox import NUM_TAGS, tag_of
from shared.peer.ring import FeatureRing
from shared.times import clock_id
from shared.tree import are_trees, check_tree
from target_service.batch import SampledTrees
from target_service.batch_window import BatchWindow
from target_service.commit import AcceptedNodes
from target_service.request import Phase, QueuedRound, TargetRequest
from target_service.runner import PathOutputs

_MOST_LATE = 10  # times that count


class PeerRounds:
    """Orders trees over channels and queues what comes back.

    Args:
        requests: Of the engine, by request_id.
        order: Counts whatever is queued, of all kinds.
        ring: Carries feature rows; None: drafts that take any are ordered one by one.
        has_mailbox: Drafts may post trees to the target's device.
        max_context_len: Longest sequence, prompt and output.
    """

    def __init__(
        self,
        requests: Mapping[str, TargetRequest],
        batch_window: BatchWindow,
        info: WorkerInfo,
        *,
        order: Iterator[int],
        ring: FeatureRing | None,
        has_mailbox: bool,
        max_context_len: int,
    ) -> None:
        self._requests = requests
        self._batch_window = batch_window
        self._info = info
        self._order = order
        self._ring = ring
        self._has_mailbox = has_mailbox
        self._max_context_len = max_context_len

    def open(self, message: PeerAttach, channel: PeerChannel) -> None:
        """Take note of a draft, unless a newer one has the request: that one was asleep."""
        request = self._requests.get(message.request_id)
        if request is None or request.open.target_epoch != message.target_epoch:
            return
        if message.draft_epoch >= request.draft_epoch:
            self.end(request)
            request.channel, request.draft_epoch = channel, message.draft_epoch
            request.has_mailbox = message.has_mailbox and self._has_mailbox
            request.is_draft_ahead = False
            request.num_late = request.mailed_from = 0

    def grant(self, request: TargetRequest, until_round_idx: int, trees: PeerTrees) -> None:
        """Take leave to order trees, and order one if the request waits for it."""
        if request.channel is None or request.draft_epoch != trees.draft_epoch:
            return  # it broke meanwhile; the orchestrator orders what it does not hear of
        if request.grant is None:
            request.num_tokens_sent = trees.token_offset
        request.grant, request.grant_until = trees, until_round_idx
        is_between_rounds = request.queued is None and not request.num_in_flight
        if request.phase is Phase.RUNNING and is_between_rounds:
            self.order(request)

    def end(self, request: TargetRequest) -> None:
        """Order no more trees; one that is ordered and not here will not be taken."""
        num_begun = request.num_in_flight + (request.queued is not None)
        request.ordered_round = min(request.ordered_round, request.round_idx + num_begun)
        request.grant = request.mailed = None
        self._batch_window.gave_up(request.request_id)

    def order(self, request: TargetRequest) -> None:
        """Order the tree of the next round of the draft, if that is granted and not done yet."""
        round_idx = request.round_idx + 1
        grant = request.grant
        if grant is None or not request.ordered_round < round_idx <= request.grant_until:
            return
        assert request.channel is not None
        request.ordered_round = round_idx
        shape = grant.shape.within(self._max_context_len - request.seq_len)
        if shape is None:
            self._queue(request, None)
            return
        request.channel.put(
            DraftRound(
                request_id=request.request_id,
                target_epoch=request.open.target_epoch,
                draft_epoch=grant.draft_epoch,
                round_idx=round_idx,
                seq_len=request.seq_len,
                token_offset=request.num_tokens_sent,
                token_ids=tuple(request.tokens[request.num_tokens_sent :]),
                shape=shape,
            )
        )
        request.num_tokens_sent = len(request.tokens)
        request.ordered_ns = self._batch_window.ordered(request.request_id, shape.num_draft_tokens)

    def order_next(
        self, trees: SampledTrees, nodes: Sequence[AcceptedNodes], paths: PathOutputs
    ) -> None:
        """Order the trees of the rounds after those of a step, which is not committed yet.

        Whether a request ends with its path is found out while its tree is being grown; such a tree
        is grown for nothing.
        """
        rows_of: dict[tuple[PeerChannel, TreeShape, bool], list[int]] = {}
        for row, (request, path) in enumerate(zip(trees.requests, nodes, strict=True)):
            if trees.awaited is not None:
                _note_wait(request, path)
            is_held = self._requests.get(request.request_id) is request
            if is_held and self._goes_on(request, path):
                assert request.channel is not None and request.grant is not None
                key = (request.channel, request.grant.shape, request.features is not None)
                rows_of.setdefault(key, []).append(row)
        for (channel, shape, has_features), rows in rows_of.items():
            members = [(trees.requests[row], nodes[row]) for row in rows]
            ring_rows = None
            if has_features:
                ring_rows = self._write(paths, rows, members)
                if ring_rows is None:
                    continue  # too many for the ring: in messages, as each is committed
            parts = tuple(
                PathEntry(
                    request.request_id,
                    request.open.target_epoch,
                    request.draft_epoch,
                    request.round_idx + 2,
                    path.seq_len,
                    path.token_ids,
                    request.req_idx,
                    self._number(request, shape),
                )
                for request, path in members
            )
            ordered_ns = time.monotonic_ns()
            channel.put(PathBatch(parts=parts, shape=shape, rows=ring_rows))
            if not all([request.is_draft_ahead for request, _ in members]):
                channel.flush()  # else the draft's device is at work, and nobody waits for this
            for (request, path), part in zip(members, parts, strict=True):
                request.ordered_round = request.round_idx + 2
                request.num_tokens_sent += len(path.token_ids)
                request.ordered_ns = ordered_ns
                request.mailed = shape if part.round_tag else None
                self._batch_window.ordered(request.request_id, shape.num_draft_tokens)
                if request.features is not None:
                    assert request.features.next is not None
                    request.features.next += len(path.token_ids)

    def take(
        self, channel: PeerChannel, batch: TreeBatch
    ) -> Iterator[tuple[PeerTree, InvalidTreeError]]:
        """Queue the rounds of trees that were ordered here, unless they have been given up.

        Yields: Wrong trees.
        """
        vocab_size = self._info.vocab_size
        are_sound = are_trees(
            batch.token_ids, batch.parent_index, batch.num_nodes, vocab_size=vocab_size
        )
        for tree in batch.trees():
            request = self._requests.get(tree.request_id)
            if request is None or request.grant is None or request.channel is not channel:
                continue
            is_current = (
                tree.round_idx == request.round_idx + 1
                and tree.draft_epoch == request.draft_epoch
                and tree.target_epoch == request.open.target_epoch
            )
            request.is_draft_ahead = batch.is_overlapped
            if is_current and request.num_in_flight:
                request.draft_times = tree.times  # the device has the tree already
            if not is_current or request.queued is not None or request.num_in_flight:
                continue
            self._batch_window.arrived(tree.request_id)
            try:
                self._check(request, tree, is_sound=are_sound)
            except InvalidTreeError as error:
                yield tree, error
                continue
            if request.open.is_timed:
                times = AnswerTimes(clock_id=clock_id(), begin_ns=request.ordered_ns)
                times = times.including("draft", tree.times)
                request.queued_times = times.then("channel", time.monotonic_ns())
            self._queue(request, tree)

    def _number(self, request: TargetRequest, shape: TreeShape) -> int:
        """Return the number that the round after the one in flight has in the mailbox.

        Returns: 0 if it has none: the draft does not look there, has been late, or sampling must
            know the tree.
        """
        if not request.has_mailbox or shape.num_steps >= MAX_PATH:
            return 0
        if request.round_idx + 2 < request.mailed_from:
            return 0
        stopping = request.open.stopping
        is_masked = stopping.stop_token_ids and stopping.min_new_tokens
        if is_masked or request.open.sampling.has_penalties:
            return 0
        if request.tag_base is None:
            request.tag_base = secrets.randbelow(NUM_TAGS)  # of nobody who had the slot before
        return tag_of(request.tag_base, request.round_idx + 2)

    def _goes_on(self, request: TargetRequest, path: AcceptedNodes) -> bool:
        """Return whether the round after a path, not committed yet, can be ordered in a batch."""
        grant, log, num_tokens = request.grant, request.features, len(path.token_ids)
        if grant is None or request.num_in_flight > 1:
            return False
        if not request.ordered_round < request.round_idx + 2 <= request.grant_until:
            return False
        if log is not None:
            is_next = (
                request.feature_channel is request.channel and log.next == path.seq_len == log.end
            )
            if not is_next or self._ring is None:
                return False
        return (
            request.num_tokens_sent == len(request.tokens)
            and len(request.tokens) + num_tokens < request.token_limit
            and path.seq_len + num_tokens + grant.shape.num_draft_tokens <= self._max_context_len
        )

    def _write(
        self,
        paths: PathOutputs,
        rows: Sequence[int],
        members: Sequence[tuple[TargetRequest, AcceptedNodes]],
    ) -> RingRows | None:
        """Write the feature rows of some paths; return None if the ring does not take as many.

        Args:
            rows: Of `paths`, one for each member.
        """
        assert self._ring is not None and paths.features is not None
        counts = [len(path.token_ids) for _, path in members]
        parts = [paths.features[row, :count] for row, count in zip(rows, counts, strict=True)]
        span = self._ring.write(*parts)
        if span is None:
            return None
        features = self._info.features
        return RingRows(shape=(sum(counts), features.width), dtype=features.dtype, data=span)

    def _check(self, request: TargetRequest, tree: PeerTree, *, is_sound: bool) -> None:
        """Raise InvalidTreeError unless a tree is the one that was ordered.

        Args:
            is_sound: It is known to be a tree, of tokens of the vocabulary.
        """
        if tree.seq_len != request.seq_len:
            raise InvalidTreeError(
                f"seq_len is {tree.seq_len}, expected {request.seq_len}", field="seq_len"
            )
        assert request.grant is not None
        root_token_id, most = request.tokens[-1], request.grant.shape.num_draft_tokens
        if is_sound and tree.token_ids[0] == root_token_id and len(tree.token_ids) <= most:
            return
        check_tree(
            tree.token_ids,
            tree.parent_index,
            root_token_id=root_token_id,
            vocab_size=self._info.vocab_size,
            max_num_nodes=most,
        )

    def _queue(self, request: TargetRequest, tree: PeerTree | None) -> None:
        request.queued = QueuedRound(tree)
        request.queued_order = next(self._order)


def _note_wait(request: TargetRequest, path: AcceptedNodes) -> None:
    """Take note whether the device waited for a tree in vain, with all that it was to compute.

    Whoever lets it is trusted with it less each time: after the first, the host waits for one tree,
    where the orchestrator sees it; then for two, four, ..
    """
    if path.num_nodes > 1:
        request.num_late = max(request.num_late - 1, 0)
        return
    request.num_late = min(request.num_late + 1, _MOST_LATE)
    request.mailed_from = request.round_idx + 2 + (1 << (request.num_late - 1))
