"""Where the trees of rounds come from: the one interface of all kinds of rounds to the engine.

    relayed rounds   `TreeSource` itself: the orchestrator brings every tree in its order
    peer rounds      `PeerRounds`: the target orders trees of drafts whose engines are attached
    device rounds    `DeviceRounds`: peer rounds whose paths and trees also go from device to device
                     through a mailbox, so that no device waits for a host

Each kind does what the kinds above it do, and more. An engine works with any of them; a method that
is not overridden does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from shared.errors import InvalidTreeError
from shared.kernels.mailbox_trees import TakenTrees
from shared.messages import PeerAttach, PeerTree, RowsOffer, TreeBatch
from shared.peer.channel import PeerChannel
from shared.step.staging import Staging
from target_service.batch_window import BatchWindow
from target_service.feature_log import FeatureRows
from target_service.nodes import AcceptedNodes, SampledTrees
from target_service.phases import (
    ExtendInput,
    MailboxPaths,
    MailboxTrees,
    VerifyInput,
    VerifyOutput,
)
from target_service.request import TargetRequest
from target_service.scheduler import Scheduler, StepPlan


class TreeSource:
    """Relayed rounds only: no draft is attached, and no credit brings trees.

    Args:
        window: Decides how long trees that are here wait for trees that are being grown.
    """

    def __init__(self, window: BatchWindow) -> None:
        self.window = window

    # --- drafts and credit -----------------------------------------------------------------------

    def attach(self, message: PeerAttach, channel: PeerChannel) -> None:
        """Take note of a draft whose engine can be asked for a request's trees."""

    def take_offer(self, channel: PeerChannel, offer: RowsOffer) -> None:
        """Decide whether feature rows go to memory of a draft's device, and tell the draft."""

    def lose(self, channel: PeerChannel) -> None:
        """Leave the memory of a draft whose channel has ended, and whose requests have none."""

    def begin_prompts(self, requests: Iterable[TargetRequest]) -> None:
        """Note that the next step has the first rows of these requests' prompts."""

    def take_credit(self, request: TargetRequest) -> None:
        """Order the trees of the request's credit from now on, if its draft is attached."""

    def end_credit(self, request: TargetRequest) -> None:
        """Give up: order no more trees, and take none that is ordered and not here."""

    # --- trees -----------------------------------------------------------------------------------

    def order(self, request: TargetRequest) -> None:
        """Order the tree of a request's next round, if the credit covers it and it is not ordered.

        Of a draft that is behind one now and then, without waiting for it: the first that comes
        says that it has caught up.
        """

    def order_next(
        self, trees: SampledTrees, nodes: Sequence[AcceptedNodes], features: FeatureRows | None
    ) -> None:
        """Order the trees of the rounds after those of a step, which is not committed yet.

        Whether a request ends with its path is found out while its tree is being grown; such a tree
        is grown for nothing. Lateness of the step's own trees is noted as well.

        Args:
            features: [B, D + 1, row_bytes], rows of each path; None: no request keeps any.
        """

    def note_step(
        self, trees: SampledTrees, nodes: Sequence[AcceptedNodes], *, is_clean: bool
    ) -> None:
        """Take note of a step that was read, before its rounds are committed.

        Args:
            is_clean: It had no rows but those of the trees.
        """

    def learn(self) -> None:
        """Learn from the step that was noted: its answers and orders are on their way."""

    def take(
        self, channel: PeerChannel, batch: TreeBatch
    ) -> Iterator[tuple[PeerTree, InvalidTreeError]]:
        """Queue the rounds of trees that were ordered; yield the trees that are wrong."""
        yield from ()

    def launched(self, requests: Sequence[TargetRequest]) -> None:
        """Take note that these requests' rounds are in flight: no other tree of theirs will do."""

    # --- device rounds ---------------------------------------------------------------------------

    def has_device_trees(self, scheduler: Scheduler) -> bool:
        """Return whether the device can wait for some tree: the step that it is in can be launched
        before the tree is here.
        """
        return False

    def plan(self, scheduler: Scheduler) -> StepPlan:
        """Plan a step of whatever is ready, and of all trees that the device can wait for."""
        return scheduler.plan()

    def place_trees(self, requests: Sequence[TargetRequest], staging: Staging) -> MailboxTrees:
        """Say where the device finds the trees of these requests."""
        raise AssertionError("only a source with a mailbox queues a DeviceTree")

    def take_trees(
        self,
        trees: MailboxTrees,
        inputs: ExtendInput,
        newest_slot: torch.Tensor,
        *,
        num_rows: int,
    ) -> TakenTrees:
        """Let the device wait for trees and lay them out as the first rows of a step.

        Args:
            newest_slot: Where the device keeps how far requests have come.
            num_rows: Of these trees.
        Mutates: the rows of `inputs`.
        """
        raise AssertionError("only a source with a mailbox places trees")

    def place_paths(
        self, requests: Sequence[TargetRequest], staging: Staging, num_places: int
    ) -> MailboxPaths | None:
        """Say where the device posts the accepted paths of these requests; None: there is no
        mailbox.

        Args:
            num_places: Of these requests and of padding.
        """
        return None

    def post_paths(self, verify: VerifyInput, verified: VerifyOutput) -> None:
        """Let the device post the accepted paths of a step, if `place_paths` said where."""
