"""A request's draft whose engine is attached to this target's engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shared.messages import PeerTrees, TreeShape
from shared.peer.channel import PeerChannel


class Progress(enum.Enum):
    """How far a draft has read the tokens of its request, as its target knows.

    BEHIND ─▶ ASKED ─▶ (JOINING ─▶) CAUGHT_UP. A rest leads from each state to RESTING, its end to
    ASKED; the end of a credit leads back to BEHIND unless the draft has caught up. Rounds wait for
    trees in CAUGHT_UP alone; in all other states they have the root alone.
    """

    BEHIND = "no tree is ordered; rounds go on with the root alone"
    ASKED = "its first tree is ordered, again and again; it comes once the draft has caught up"
    JOINING = "its first tree came beside a round; the next order lets its device grow by itself"
    CAUGHT_UP = "a tree of it came: a round waits for its tree"
    RESTING = "no tree is wanted, and nothing is sent to it"


@dataclass(slots=True, kw_only=True)
class MailboxUse:
    """What a request and its draft exchange through the target's mailbox.

    Args:
        tag_base: The request's round tags count from here (see mailbox.py); None: no tree was
            ordered yet.
        tagged_round: Last round whose tree was ordered through the mailbox.
        tagged_shape: Shape of that tree.
        following_shape: Shape of the tree after that one, which the draft's device grows without an
            order; None: it grows none.
        launched_round: Last round that was launched before its tree had come.
        slot: Where in the mailbox that tree comes.
        num_late: How often the device waited in vain for a tree, less how often a tree came.
        resumes_at: First round whose tree may be ordered through the mailbox again.
        paths_from: While the draft joins: first round whose path is posted. Earlier rounds were
            launched before the request had tags.
        joins_until: If the draft has not joined by this round, rounds wait for the draft's host.
        streams_wait: Streams wait for trees, no kernel does.
    """

    tag_base: int | None = None
    tagged_round: int = 0
    tagged_shape: TreeShape | None = None
    following_shape: TreeShape | None = None
    launched_round: int = 0
    slot: int = -1
    num_late: int = 0
    resumes_at: int = 0
    paths_from: int = 0
    joins_until: int = 0
    streams_wait: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class DraftPeer:
    """The draft of one request, from PeerAttach to PeerDetach or to the end of the channel.

    Args:
        channel: To the draft's engine.
        draft_epoch: Epoch of the draft's state.
        mailbox: None: the draft posts no trees to this target's mailbox.
        credit: Leave to order trees; None: no tree may be ordered.
        progress: How far the draft has read; whether rounds wait for its trees.
        num_tokens_sent: Tokens of the request that the draft has.
        ordered_round: Last round whose tree the target ordered, at `ordered_ns`.
        waits_from: First round that waits for a tree, once the draft has caught up.
        is_reported_resting: What the last DraftRest to the orchestrator said.
    """

    channel: PeerChannel
    draft_epoch: int
    mailbox: MailboxUse | None = None
    credit: PeerTrees | None = None
    progress: Progress = Progress.BEHIND
    num_tokens_sent: int = 0
    ordered_round: int = 0
    ordered_ns: int = 0
    waits_from: int = 0
    is_reported_resting: bool = False

    @property
    def is_waited_for(self) -> bool:
        """Return whether the request's next round waits for a tree of this draft."""
        return self.credit is not None and self.progress is Progress.CAUGHT_UP

    def progress_in(self, round_idx: int) -> Progress:
        """Return how far the draft was for a round that was launched."""
        has_joined = round_idx < self.waits_from and self.progress is Progress.CAUGHT_UP
        return Progress.JOINING if has_joined else self.progress
