"""Peer rounds: the target orders trees from drafts whose engines are attached to its engine.

The orchestrator gives the credit, gets every path, and orders a round itself if a path does not
come. A lost message costs a round its tree, or a wait, and no token.

A draft that attaches has a prompt to read. The target orders one tree and goes on with root-only
rounds until this tree comes, as a rule too late for the round that it was ordered for. From then on
rounds wait for trees. If the draft's device can grow trees without orders from its host, root-only
rounds go on until it does (`Progress.JOINING`): a round that waits for the draft's host would miss
steps. In case the order or its tree is lost, another tree is ordered every `ASK_ROUNDS` rounds.

A request may rest: `TreeShapes.of` gives it no tree for a while. Its rounds have the root alone,
and its draft gets nothing (resting.py). When the request is given a tree again, one tree is ordered
as if the draft had just attached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from shared.errors import InvalidTreeError
from shared.messages import (
    PathBatch,
    PathRows,
    PeerAttach,
    PeerTree,
    PeerTrees,
    TreeBatch,
    TreeShape,
)
from shared.peer.channel import PeerChannel
from shared.tree import are_trees
from target_service.batch_window import BatchWindow
from target_service.budgets.shapes import TreeShapes
from target_service.draft_peer import DraftPeer, MailboxUse, Progress
from target_service.engine_state import EngineState
from target_service.feature_log import FeatureRows
from target_service.nodes import AcceptedNodes, SampledTrees
from target_service.path_rows import place_rows
from target_service.request import ROOT_ONLY, Phase, QueuedRound, TargetRequest
from target_service.resting import begin_rest, report_rest
from target_service.tree_orders import check_ordered_tree, may_order, path_entry, put_order
from target_service.tree_source import TreeSource

_NextShapes = tuple[TreeShape, TreeShape | None]  # of the tree that is ordered, of the one after

ASK_ROUNDS = 16
"""Rounds of the root alone after which the first tree of a draft is ordered anew."""


class _Orders(NamedTuple):
    """What a PathBatch orders: trees of a shape, one after each path."""

    shape: TreeShape
    requests: Sequence[TargetRequest]
    paths: Sequence[AcceptedNodes]


class PeerRounds(TreeSource):
    """Orders trees over peer channels, and queues the rounds of trees that come back.

    Args:
        shapes: Chooses the shapes of trees; None: every tree has the shape of its credit.
    """

    def __init__(
        self, state: EngineState, window: BatchWindow, shapes: TreeShapes | None = None
    ) -> None:
        super().__init__(window)
        self.shapes = TreeShapes() if shapes is None else shapes
        self._state = state
        self._requests = state.requests
        self._max_context_len = state.info.max_context_len

    # --- drafts and credit -----------------------------------------------------------------------

    def attach(self, message: PeerAttach, channel: PeerChannel) -> None:
        request = self._requests.get(message.request_id)
        if request is None or request.target_epoch != message.target_epoch:
            return
        if message.draft_epoch >= request.newest_draft_epoch:  # else this draft was asleep
            self.end_credit(request)
            request.newest_draft_epoch = message.draft_epoch
            request.draft = DraftPeer(
                channel=channel,
                draft_epoch=message.draft_epoch,
                mailbox=self._mailbox_use(message),
                num_tokens_sent=message.num_tokens,
            )
            self.shapes.begin(request)
            self.take_credit(request)
            if request.phase is not Phase.RUNNING and self.shapes.would_rest(request):
                self._hold_back(request)

    def begin_prompts(self, requests: Iterable[TargetRequest]) -> None:
        """Decide anew whether drafts read these prompts as well: more requests may have come since
        the drafts were attached, or some may have ended.
        """
        for request in requests:
            log = request.features
            if request.draft is None or log is None or log.end:
                continue
            if self.shapes.would_rest(request):
                self._hold_back(request)
            elif log.is_held_back:
                self._state.features.wake(request, at_once=True)

    def _hold_back(self, request: TargetRequest) -> None:
        """Send no rows of a prompt to its draft until the first tree is wanted."""
        self._state.features.hold_back(request)
        if self.shapes.needs_no_rows(request):
            self._state.features.keep_none(request)

    def take_credit(self, request: TargetRequest) -> None:
        peer, trees = request.draft, request.peer_trees
        if peer is None:
            return
        if trees is None or trees.draft_epoch != peer.draft_epoch:
            self.end_credit(request)
            return
        peer.credit = trees
        if peer.progress is Progress.ASKED:
            peer.progress = Progress.BEHIND  # another order may have replaced that one
        self.order(request)

    def end_credit(self, request: TargetRequest) -> None:
        peer = request.draft
        if peer is not None:
            begun = request.round_idx + request.num_in_flight + (request.queued is not None)
            if peer.ordered_round > begun:  # that tree may never come
                peer.ordered_round, peer.progress = begun, Progress.BEHIND
            if peer.progress in (Progress.RESTING, Progress.JOINING):
                peer.progress = Progress.BEHIND
            report_rest(self._state, request, peer, is_resting=False)
            peer.credit = None
            if request.phase is not Phase.WAITING:  # else it has ended, or makes room
                self._state.features.wake(request, at_once=True)
        self.window.gave_up(request.request_id)

    # --- trees -----------------------------------------------------------------------------------

    def order(self, request: TargetRequest) -> None:
        peer, round_idx = request.draft, request.round_idx + 1
        if peer is None or peer.credit is None or not may_order(request, peer, round_idx):
            return
        if request.phase is not Phase.RUNNING:
            return
        wanted = self.shapes.of(request, peer.credit)
        if wanted is None:
            if peer.progress is not Progress.RESTING:
                begin_rest(self._state, request, peer)
            if request.keeps_rows and self.shapes.needs_no_rows(request):
                self._state.features.keep_none(request)
            return
        shape = wanted.within(self._max_context_len - request.committed_len)
        self._order_if_ready(request, peer, shape)

    def _order_if_ready(
        self, request: TargetRequest, peer: DraftPeer, shape: TreeShape | None
    ) -> None:
        """Order the next tree if the draft's progress allows it.

        Args:
            shape: None: the context has no room for a tree.
        """
        round_idx = request.round_idx + 1
        match peer.progress:
            case Progress.CAUGHT_UP | Progress.JOINING if request.is_between_rounds:
                peer.progress = Progress.CAUGHT_UP
                if shape is None:
                    peer.ordered_round = round_idx
                    self._queue(request, ROOT_ONLY)
                else:
                    put_order(request, peer, shape)
                    self.window.ordered(request.request_id, shape.num_draft_tokens)
            case Progress.JOINING if not self._goes_on_joining(request, peer):
                _has_caught_up(request, peer)
            case Progress.JOINING if shape and peer.num_tokens_sent < len(request.tokens):
                put_order(request, peer, shape)  # for its tokens: the tree will be late
            case Progress.BEHIND | Progress.RESTING if shape is not None:
                self._state.features.wake(request)
                put_order(request, peer, shape)  # no other tree waits for this one
                peer.progress = Progress.ASKED
            case Progress.ASKED if round_idx >= peer.ordered_round + ASK_ROUNDS and shape:
                report_rest(self._state, request, peer, is_resting=False)
                put_order(request, peer, shape)

    def order_next(
        self, trees: SampledTrees, nodes: Sequence[AcceptedNodes], features: FeatureRows | None
    ) -> None:
        self.shapes.begin_orders()
        rows_of = self._rows_to_order(trees, nodes, has_features=features is not None)
        ordered = []
        for (channel, shapes, has_features), rows in rows_of.items():
            requests, paths = [trees.requests[row] for row in rows], [nodes[row] for row in rows]
            if not has_features:
                ordered.append(self._put_paths(channel, shapes, requests, paths, None))
                continue
            assert features is not None
            parts = [
                features[row, : len(path.token_ids)] for row, path in zip(rows, paths, strict=True)
            ]
            for span, place, prepare in place_rows(self._state.features, channel, requests, parts):
                ordered.append(
                    self._put_paths(channel, shapes, requests[span], paths[span], place, prepare)
                )
        ordered_ns = time.monotonic_ns()
        # Before they are committed: the draft works on the next ones meanwhile. And of all shapes
        # at once: paths whose orders come later than others the draft would extend once more.
        for channel in dict.fromkeys(channel for channel, _, _ in rows_of):
            channel.flush()
        for orders in ordered:
            self._note_orders(orders, ordered_ns)

    def _rows_to_order(
        self, trees: SampledTrees, nodes: Sequence[AcceptedNodes], *, has_features: bool
    ) -> dict[tuple[PeerChannel, _NextShapes, bool], list[int]]:
        """Return the rows of requests whose next trees can be ordered before the commit, by what a
        PathBatch has in common: channel, shapes, whether it has features.

        Args:
            has_features: The step has brought any.
        """
        rows_of: dict[tuple[PeerChannel, _NextShapes, bool], list[int]] = {}
        for row, (request, path) in enumerate(zip(trees.requests, nodes, strict=True)):
            peer = request.draft
            if peer is None or peer.credit is None:
                continue
            if peer.progress not in (Progress.CAUGHT_UP, Progress.JOINING):
                continue
            if not self._goes_on(request, peer, path):
                continue
            if request.features is not None and not has_features:
                continue  # it was dormant at the launch
            shape, following = self._next_shapes(request, peer, peer.credit)
            if shape is None:
                continue  # it rests once the path is committed
            key = (peer.channel, (shape, following), request.features is not None)
            rows_of.setdefault(key, []).append(row)
        return rows_of

    def _put_paths(
        self,
        channel: PeerChannel,
        shapes: _NextShapes,
        requests: Sequence[TargetRequest],
        paths: Sequence[AcceptedNodes],
        rows: PathRows | None,
        prepare: Callable[[], None] | None = None,
    ) -> _Orders:
        """Queue a PathBatch."""
        shape, following = shapes
        entries = []
        for request, path in zip(requests, paths, strict=True):
            assert request.draft is not None
            tag = self._next_round_tag(request, request.draft, shape, following)
            entries.append(path_entry(request, request.draft, path, tag))
        batch = PathBatch(parts=tuple(entries), shape=shape, following=following, rows=rows)
        channel.put(batch, prepare=prepare)
        return _Orders(shape, requests, paths)

    def _note_orders(self, orders: _Orders, ordered_ns: int) -> None:
        """Take note of the orders of a PathBatch, which has been sent."""
        for request, path in zip(orders.requests, orders.paths, strict=True):
            peer = request.draft
            assert peer is not None
            peer.ordered_round = request.round_idx + 2
            peer.num_tokens_sent += len(path.token_ids)
            peer.ordered_ns = ordered_ns
            if peer.progress is Progress.JOINING:
                _has_caught_up(request, peer)
            if request.num_in_flight == 1:  # else the next round is launched already
                self.window.ordered(request.request_id, orders.shape.num_draft_tokens)

    def note_step(
        self, trees: SampledTrees, nodes: Sequence[AcceptedNodes], *, is_clean: bool
    ) -> None:
        self.shapes.note_step(trees, nodes, is_clean=is_clean)

    def learn(self) -> None:
        self.shapes.learn()

    def take(
        self, channel: PeerChannel, batch: TreeBatch
    ) -> Iterator[tuple[PeerTree, InvalidTreeError]]:
        self.shapes.note_targets(batch.num_targets)
        are_sound = are_trees(
            batch.token_ids,
            batch.parent_index,
            batch.num_nodes,
            vocab_size=self._state.info.vocab_size,
        )
        for tree in batch.trees():
            request = self._requests.get(tree.request_id)
            peer = request.draft if request is not None else None
            if request is None or peer is None or peer.channel is not channel:
                continue
            if (tree.draft_epoch, tree.target_epoch) != (peer.draft_epoch, request.target_epoch):
                continue
            if peer.progress is Progress.RESTING:
                continue  # no tree is wanted any more
            was_behind = peer.progress is not Progress.CAUGHT_UP
            if was_behind and peer.progress is not Progress.JOINING:  # whatever round it is for
                joins = self._begin_joining(request, peer)
                peer.progress = Progress.JOINING if joins else Progress.CAUGHT_UP
            report_rest(self._state, request, peer, is_resting=False)
            if peer.credit is None:
                continue  # given up
            try:
                self._take_tree(request, peer, peer.credit, tree, is_sound=are_sound)
            except InvalidTreeError as error:
                yield tree, error
            else:
                if was_behind:
                    self.order(request)

    def _take_tree(
        self,
        request: TargetRequest,
        peer: DraftPeer,
        credit: PeerTrees,
        tree: PeerTree,
        *,
        is_sound: bool,
    ) -> None:
        """Queue the round of a tree, if it is the next one and waits for it.

        Raises: InvalidTreeError.
        """
        recorder, key = self._state.recorder, (tree.request_id, tree.round_idx)
        if tree.round_idx != request.round_idx + 1:
            return
        if request.num_in_flight:  # the device has the tree already, or the root alone
            if request.num_unsure and not recorder.has_begun(*key):
                recorder.include(*key, "draft", tree.times)
        elif request.queued is None:
            self.window.arrived(tree.request_id)
            vocab_size = self._state.info.vocab_size
            check_ordered_tree(request, credit, tree, is_sound=is_sound, vocab_size=vocab_size)
            recorder.begin(*key, peer.ordered_ns)
            recorder.include(*key, "draft", tree.times)
            recorder.stage(*key, "channel")
            self._queue(request, request.host_tree(tree, "peer"))

    def launched(self, requests: Sequence[TargetRequest]) -> None:
        for request in requests:
            self.window.gave_up(request.request_id)

    # --- hooks of device rounds ------------------------------------------------------------------

    def _mailbox_use(self, message: PeerAttach) -> MailboxUse | None:
        """Return how a draft that attaches uses the mailbox; None: it does not."""
        return None

    def _next_shapes(
        self, request: TargetRequest, peer: DraftPeer, credit: PeerTrees
    ) -> tuple[TreeShape | None, TreeShape | None]:
        """Return the shapes of the tree after the one in flight, and of the tree after that, which
        the draft's device grows by itself; None: there is none.
        """
        return self.shapes.of(request, credit), None

    def _next_round_tag(
        self,
        request: TargetRequest,
        peer: DraftPeer,
        shape: TreeShape,
        following: TreeShape | None,
    ) -> int:
        """Return the round tag of the tree that is being ordered; 0: it comes over the channel."""
        return 0

    def _is_launched(self, request: TargetRequest, round_idx: int) -> bool:
        """Return whether the device waits for the tree of a round already."""
        return False

    def _begin_joining(self, request: TargetRequest, peer: DraftPeer) -> bool:
        """Return whether rounds of the root alone go on until the draft's device grows trees by
        itself: its first tree has come.
        """
        return False

    def _goes_on_joining(self, request: TargetRequest, peer: DraftPeer) -> bool:
        """Return whether such rounds go on after one that is committed."""
        return False

    def _joins_with(self, peer: DraftPeer, round_idx: int) -> bool:
        """Return whether the draft's device may wait for the path of a round."""
        return False

    def _goes_on(self, request: TargetRequest, peer: DraftPeer, path: AcceptedNodes) -> bool:
        """Return whether the round after a path, not committed yet, can be ordered in a batch."""
        credit, num_tokens = peer.credit, len(path.token_ids)
        if credit is None or not self._state.is_held(request):
            return False
        if peer.progress is Progress.JOINING:
            if not self._joins_with(peer, request.round_idx + 2):
                return False
        elif request.num_in_flight > 1 and not self._is_launched(request, request.round_idx + 2):
            return False
        return (
            may_order(request, peer, request.round_idx + 2)
            and self._state.features.can_send_early(request, path.seq_len)
            and peer.num_tokens_sent == len(request.tokens)
            and len(request.tokens) + num_tokens < request.token_limit
            and path.seq_len + num_tokens + credit.shape.num_draft_tokens <= self._max_context_len
        )

    def _queue(self, request: TargetRequest, queued: QueuedRound) -> None:
        request.queued = queued
        request.queue_idx = next(self._state.turns)


def _has_caught_up(request: TargetRequest, peer: DraftPeer) -> None:
    """Let the rounds that are not launched yet wait for trees."""
    peer.progress = Progress.CAUGHT_UP
    peer.waits_from = request.round_idx + request.num_in_flight + 1
