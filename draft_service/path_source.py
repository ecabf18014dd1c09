"""Where accepted paths come from.

*Relayed*: the orchestrator sends what the target accepted, with the order of the next tree, through
the front (`RequestTable.take_order`). *Peer*: the target's engine does, over a peer channel
(peer_rounds.py). *Device*: the target's device posts what it accepted to a mailbox, and the draft's
device extends it and grows the next tree while the order, which one of the first two ways brings,
is still under way. What the device did counts once an order has come that says the same.

The first two ways end in an order of the request table; the third is a `PathSource`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from draft_service.phases import DraftOutput
from draft_service.request import DeviceTree, DraftRequest
from shared.messages import PathEntry, TreeShape
from shared.peer.channel import PeerChannel
from shared.step.step_timer import StepTimer

PostTrees = Callable[[torch.Tensor], None]
"""Posts the trees of a growth, as `select_nodes` packs them; launches only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedTrees:
    """What the device did before its host had the orders, and orders that have come confirm.

    Args:
        requests: Whose orders they are.
        rows: Of these requests in `output`.
        timer: Of the launch.
        num_tokens: Accepted of each request: rows that were extended.
        passed: Requests whose newest trees are verified, but of whom no order has come: their
            devices have nothing more to say of these trees.
    """

    requests: Sequence[DraftRequest]
    rows: Sequence[int]
    output: DraftOutput
    timer: StepTimer
    num_tokens: Sequence[int]
    passed: Sequence[DraftRequest]


class PathSource:
    """Accepted paths that the device has before its host. This one has none: no device does
    anything by itself, and every path comes with an order.
    """

    def connect(self, socket_name: str, channel: PeerChannel) -> None:
        """Look for the mailbox of the target at the other end of a new channel."""

    def take_answer(self, channel: PeerChannel, *, is_taken: bool) -> None:
        """Take note of where a target's device writes the feature rows of paths.

        Args:
            is_taken: To the memory that was offered; False: to the target's mailbox.
        """

    def disconnect(self, channel: PeerChannel) -> None:
        """Leave the mailbox of a target that is gone."""

    def has_mailbox(self, channel: PeerChannel) -> bool:
        """Return whether the device can post trees for the target at a channel."""
        return False

    def streams_wait(self, channel: PeerChannel) -> bool:
        """Return whether streams wait for words of such a target, and no kernel does."""
        return False

    def place_tree(
        self,
        channel: PeerChannel,
        part: PathEntry,
        shape: TreeShape,
        following: TreeShape | None,
    ) -> DeviceTree | None:
        """Return where the tree of an order is to be posted; None: nowhere.

        Args:
            following: Shape of the tree after it, which the device may grow by itself.
        """
        return None

    def stage_posts(self, requests: Sequence[DraftRequest]) -> PostTrees | None:
        """Stage where the trees of requests that are about to grow are posted; None: nowhere."""
        return None

    def ready_ahead(self, requests: Iterable[DraftRequest]) -> list[DraftRequest]:
        """Return the requests whose next trees the device can grow by itself, in one launch.

        Args:
            requests: All of the engine.
        """
        return []

    def launch_ahead(
        self, requests: Sequence[DraftRequest], path_width: int, timer: StepTimer
    ) -> None:
        """Let the device wait for what targets accept of the newest trees, and go on from it.

        Args:
            requests: Some that are ready, with slots reserved.
            path_width: Tokens of the longest path through any of their trees.
        """
        raise AssertionError("no request is ready")

    def ahead_until_s(self, requests: Iterable[DraftRequest]) -> float:
        """Return how long the host should leave the device alone, which waits for paths; a time of
        the monotonic clock. 0: it does not wait, or not for long yet, or an order is here that ends
        the wait.

        Args:
            requests: All of the engine.
        """
        return 0.0

    def confirm(self, hear: Callable[[], None]) -> ConfirmedTrees | None:
        """Return what was launched and is the same as what would be done now; the rest is void.

        Waits for the device, which waits no longer for paths that are not there.

        Args:
            hear: Takes the orders that have come meanwhile.
        """
        return None

    def compile(self, dtype: torch.dtype) -> None:
        """Compile what posts and takes.

        Args:
            dtype: Of the features that will come.
        """
