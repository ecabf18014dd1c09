"""Device rounds: peer rounds whose paths and trees also go from device to device.

The hosts exchange the same messages as in peer rounds. But the target's host launches a step before
the step's trees have come, and before it has read the result of the step in flight. On the device
the step takes the trees from the mailbox (`take_trees`), puts them into the slots after the roots,
verifies them, and posts the accepted paths to the mailbox (`post_paths`), where the draft's device
waits for them. If a tree does not come in time, the round has the root alone, and the next rounds
of this request take trees from the channel for a while (`_note_wait`).

A *round tag* is a number that a round's words in the mailbox carry, so that words of other rounds
are not taken. A request has tags while its trees are ordered through the mailbox.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from shared.kernels.mailbox_paths import post_paths
from shared.kernels.mailbox_trees import TakenTrees, take_trees
from shared.kernels.mailbox_words import MAX_PATH
from shared.messages import PeerAttach, PeerTrees, RowsOffer, TreeShape
from shared.peer.channel import PeerChannel
from shared.peer.device_memory import CudaMemory
from shared.peer.mailbox import NUM_TAGS, Mailbox, tag_of
from shared.peer.stream_waits import NO_TREE, StreamWaits
from shared.step.staging import Fields, Staging
from target_service.batch_window import BatchWindow
from target_service.budgets.shapes import TreeShapes
from target_service.device_rounds.draft_rows import DraftRows
from target_service.draft_peer import DraftPeer, MailboxUse, Progress
from target_service.engine_state import EngineState
from target_service.feature_log import FeatureRows
from target_service.nodes import AcceptedNodes, SampledTrees
from target_service.peer_rounds import PeerRounds
from target_service.phases import (
    ExtendInput,
    MailboxPaths,
    MailboxTrees,
    VerifyInput,
    VerifyOutput,
)
from target_service.request import DeviceTree, Phase, TargetRequest
from target_service.scheduler import Scheduler, StepPlan

# How long the device waits for a tree. Growth takes a millisecond or two; behind rows of a prompt,
# ten.
PATIENCE_US = 30_000
# The same for a kernel whose stream has already waited for all trees.
_SHORT_PATIENCE_US = 200
_MOST_LATE = 10  # upper bound of MailboxUse.num_late
# Most root-only rounds after a draft's first tree, until its device grows trees by itself; as a
# rule it takes two.
_MOST_JOINING = 4
_NOWHERE = -1


class DeviceRounds(PeerRounds):
    """Orders trees through the mailbox where the draft reads it, and over channels elsewhere."""

    def __init__(
        self,
        state: EngineState,
        window: BatchWindow,
        mailbox: Mailbox,
        shapes: TreeShapes | None = None,
    ) -> None:
        super().__init__(state, window, shapes)
        self.mailbox = mailbox
        self.draft_rows = DraftRows(mailbox, CudaMemory(mailbox.device))
        # By slot, the tag of a round that the device must not wait for: it looks while it waits.
        self._given_up = torch.zeros(
            mailbox.num_slots, dtype=torch.int32, pin_memory=mailbox.device.type == "cuda"
        )
        self._first_nodes = mailbox.trees[:, 1]  # every posted tree has one
        self._stream_waits = StreamWaits(PATIENCE_US / 1e6, small=NO_TREE, device=mailbox.device)

    def take_offer(self, channel: PeerChannel, offer: RowsOffer) -> None:
        self.draft_rows.take(channel, offer)

    def lose(self, channel: PeerChannel) -> None:
        self.draft_rows.lose(channel)

    def learn(self) -> None:
        super().learn()
        self.draft_rows.unmap_unused()

    def end_credit(self, request: TargetRequest) -> None:
        super().end_credit(request)
        use = _mailbox_use_of(request)
        if use is not None:
            use.tagged_round = 0
            if use.launched_round > request.round_idx and use.tag_base is not None:
                tag = tag_of(use.tag_base, use.launched_round)
                self._given_up[use.slot] = tag
                if use.streams_wait:
                    self._stream_waits.end(self._first_nodes, use.slot, tag)

    def order_next(
        self, trees: SampledTrees, nodes: Sequence[AcceptedNodes], features: FeatureRows | None
    ) -> None:
        counts = self._state.counts
        for request, path in zip(trees.requests[: trees.num_on_device], nodes, strict=False):
            _note_wait(request, path)
            counts.late_trees += path.num_nodes == 1
            counts.mailbox_rows += len(path.token_ids)
        super().order_next(trees, nodes, features)

    def launched(self, requests: Sequence[TargetRequest]) -> None:
        super().launched(requests)
        for request in requests:
            use = _mailbox_use_of(request)
            if use is not None and isinstance(request.queued, DeviceTree):
                use.launched_round = request.round_idx + request.num_in_flight + 1
                use.slot = request.req_idx

    # --- a step that waits for its trees ---------------------------------------------------------

    def has_device_trees(self, scheduler: Scheduler) -> bool:
        return any([self._awaitable_shape(request) is not None for request in scheduler.held])

    def plan(self, scheduler: Scheduler) -> StepPlan:
        awaitable = [(request, self._awaitable_shape(request)) for request in scheduler.held]
        awaited = [(request, shape) for request, shape in awaitable if shape is not None]
        for request, shape in awaited:
            request.queued = DeviceTree(shape)
        plan = scheduler.plan()
        planned = set(plan.verifies) if awaited else ()
        for request, _ in awaited:
            if request not in planned:  # for want of rows; a later step waits for its tree
                request.queued = None
        return plan

    def _awaitable_shape(self, request: TargetRequest) -> TreeShape | None:
        """Return the shape of the tree of the next round to launch; None: the device cannot wait
        for this tree.
        """
        use = _mailbox_use_of(request)
        if use is None or request.phase is not Phase.RUNNING or request.queued is not None:
            return None
        if use.tagged_round != request.round_idx + 1 or request.num_in_flight > 1:
            return None
        if not request.num_in_flight:
            return use.tagged_shape
        return use.following_shape if self._goes_on_alone(request, use) else None

    def _goes_on_alone(self, request: TargetRequest, use: MailboxUse) -> bool:
        """Return whether the round after the one in flight can be launched before the result of the
        latter is read: the draft's device grows the tree once the path in flight is posted.
        """
        next_round, shape = request.round_idx + 2, use.following_shape
        return (
            shape is not None
            and use.resumes_at <= next_round <= request.credit_until
            and len(request.tokens) + 1 < request.token_limit
            and request.most_launched_len + shape.num_draft_tokens <= self._max_context_len
        )

    def place_trees(self, requests: Sequence[TargetRequest], staging: Staging) -> MailboxTrees:
        host, device = staging.place_zeros(_tree_fields, len(requests))
        host["slot"][:] = [request.req_idx for request in requests]
        host["round_tag"][:] = list(map(_round_tag, requests))
        host["is_behind"][:] = [request.num_in_flight for request in requests]
        shapes = [r.queued.shape for r in requests if isinstance(r.queued, DeviceTree)]
        awaited = {r.req_idx: _round_tag(r) for r in requests if _streams_wait(r)}
        return MailboxTrees(
            words=self.mailbox.trees,
            **device,
            num_nodes=max(shape.num_draft_tokens for shape in shapes),
            max_depth=max(shape.num_steps for shape in shapes),
            awaited=awaited,
        )

    @torch.inference_mode()
    def take_trees(
        self,
        trees: MailboxTrees,
        inputs: ExtendInput,
        newest_slot: torch.Tensor,
        *,
        num_rows: int,
    ) -> TakenTrees:
        awaited = trees.awaited
        if awaited:
            self._stream_waits.wait(self._first_nodes, list(awaited), list(awaited.values()))
        all_awaited = len(awaited) == len(trees.slot)
        return take_trees(
            trees.words,
            trees.slot,
            trees.round_tag,
            self._given_up,
            trees.is_behind,
            newest_slot,
            inputs.token_ids,
            inputs.position_ids,
            inputs.rows.slot_mapping,
            inputs.rows.attention,
            num_trees=len(trees.slot),
            num_nodes=trees.num_nodes,
            max_depth=trees.max_depth,
            num_rows=num_rows,
            vocab_size=self._state.info.vocab_size,
            timeout_us=_SHORT_PATIENCE_US if all_awaited else PATIENCE_US,
        )

    def place_paths(
        self, requests: Sequence[TargetRequest], staging: Staging, num_places: int
    ) -> MailboxPaths | None:
        tags = list(map(_path_tag, requests))
        host, device = staging.place_zeros(_path_fields, num_places)
        host["round_tag"][: len(tags)] = tags
        host["slot"].fill(_NOWHERE)
        host["slot"][: len(tags)] = [
            request.req_idx if tag else _NOWHERE
            for request, tag in zip(requests, tags, strict=True)
        ]
        host["rows"][: len(tags)] = [
            self.draft_rows.address_of(None if request.draft is None else request.draft.channel)
            for request in requests
        ]
        mailbox, rows = self.mailbox, device["rows"]
        return MailboxPaths(
            words=mailbox.paths,
            rows=None if mailbox.rows is None else rows,
            slot=device["slot"],
            round_tag=device["round_tag"],
        )

    @torch.inference_mode()
    def post_paths(self, verify: VerifyInput, verified: VerifyOutput) -> None:
        paths, outputs, walk = verify.mailbox_paths, verified.node_outputs, verified.walk
        if paths is not None:
            post_paths(
                paths.words,
                paths.rows,
                paths.slot,
                paths.round_tag,
                walk.accept_length,
                walk.path_rows,
                outputs["token_ids"],
                outputs.get("features"),
            )

    # --- orders through the mailbox --------------------------------------------------------------

    def _mailbox_use(self, message: PeerAttach) -> MailboxUse | None:
        return MailboxUse(streams_wait=message.streams_wait) if message.has_mailbox else None

    def _is_launched(self, request: TargetRequest, round_idx: int) -> bool:
        use = _mailbox_use_of(request)
        return use is not None and use.launched_round == round_idx

    def _begin_joining(self, request: TargetRequest, peer: DraftPeer) -> bool:
        use, credit = peer.mailbox, peer.credit
        if use is None or credit is None or use.num_late or not request.num_in_flight:
            return False
        if not _is_tree_for_device(request, credit.shape):
            return False
        self._begin_tags(request, use)
        use.paths_from = request.round_idx + request.num_in_flight + 1
        use.joins_until = request.round_idx + _MOST_JOINING
        return True

    def _goes_on_joining(self, request: TargetRequest, peer: DraftPeer) -> bool:
        return peer.mailbox is not None and request.round_idx < peer.mailbox.joins_until

    def _joins_with(self, peer: DraftPeer, round_idx: int) -> bool:
        return peer.mailbox is not None and peer.mailbox.paths_from <= round_idx

    def _next_shapes(
        self, request: TargetRequest, peer: DraftPeer, credit: PeerTrees
    ) -> tuple[TreeShape | None, TreeShape | None]:
        wanted, use = self.shapes.of(request, credit), peer.mailbox
        if use is None:
            return wanted, None
        is_grown_alone = use.tagged_round == request.round_idx + 1
        return (is_grown_alone and use.following_shape) or wanted, wanted

    def _next_round_tag(
        self,
        request: TargetRequest,
        peer: DraftPeer,
        shape: TreeShape,
        following: TreeShape | None,
    ) -> int:
        """Return the round tag of the round after the one in flight.

        Returns: 0 if the tree must not go through the mailbox: the draft does not read it, was late
            lately, or sampling on the host must know the tree.
        """
        use, round_idx = peer.mailbox, request.round_idx + 2
        if use is None or not _is_tree_for_device(request, shape):
            return 0
        if round_idx < use.resumes_at and round_idx != use.launched_round:
            return 0
        use.tagged_round, use.tagged_shape, use.following_shape = round_idx, shape, following
        return tag_of(self._begin_tags(request, use), round_idx)

    def _begin_tags(self, request: TargetRequest, use: MailboxUse) -> int:
        """Return the first round tag of the request."""
        if use.tag_base is None:
            # Random, so that no earlier holder of the slot had these tags; and small enough that
            # the request's tags count up.
            use.tag_base = secrets.randbelow(NUM_TAGS // 2)
            if use.streams_wait:  # words of later rounds would end a wait
                self.mailbox.trees[request.req_idx, 1] = 0
                self.mailbox.paths[request.req_idx, 0] = 0
        return use.tag_base


def _is_tree_for_device(request: TargetRequest, shape: TreeShape) -> bool:
    """Return whether paths of such trees fit into the mailbox, and the host need not know the tree
    to sample.
    """
    stopping = request.open.stopping
    is_masked = stopping.stop_token_ids and stopping.min_new_tokens
    return shape.num_steps < MAX_PATH and not (is_masked or request.is_sampled_by_path)


def _tree_fields(num_trees: int) -> Fields:
    return {**_fields(num_trees), "is_behind": (torch.int32, (num_trees,))}


def _path_fields(num_paths: int) -> Fields:
    return {**_fields(num_paths), "rows": (torch.int64, (num_paths,))}


def _fields(num_trees: int) -> Fields:
    return {"slot": (torch.int32, (num_trees,)), "round_tag": (torch.int32, (num_trees,))}


def _mailbox_use_of(request: TargetRequest) -> MailboxUse | None:
    return request.draft.mailbox if request.draft is not None else None


def _streams_wait(request: TargetRequest) -> bool:
    use = _mailbox_use_of(request)
    return use is not None and use.streams_wait


def _round_tag(request: TargetRequest) -> int:
    """Return the tag of the next round to launch; 0: it has none."""
    use = _mailbox_use_of(request)
    if use is None or use.tag_base is None:
        return 0
    return tag_of(use.tag_base, request.round_idx + request.num_in_flight + 1)


def _path_tag(request: TargetRequest) -> int:
    """Return the tag of the path of the next round to launch; 0: no draft waits for this path."""
    peer = request.draft
    return 0 if peer is None or peer.progress is Progress.RESTING else _round_tag(request)


def _note_wait(request: TargetRequest, path: AcceptedNodes) -> None:
    """Note whether the device waited in vain for a request's tree; the whole step waited with it.

    After a late tree the host, not the device, waits for the request's next tree, so that the
    orchestrator notices a silent draft; after another late one for the next 2, then 4, ... trees.
    """
    use = _mailbox_use_of(request)
    if use is None:
        return
    if path.num_nodes > 1:
        use.num_late = max(use.num_late - 1, 0)
        return
    use.num_late = min(use.num_late + 1, _MOST_LATE)
    use.resumes_at = request.round_idx + 2 + (1 << (use.num_late - 1))
