"""State of one request on a draft worker.

KV index i of a request holds position base + i; base > 0 when the draft joined a conversation
longer than its window. An EAGLE/MTP row at position p is the pair (token p + 1, feature p), a
standalone row is token p, so with L rows committed the first free position is base + L in both, and
a tree node of depth d sits at position base + L + d - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from draft_service.features import FeatureStream
from shared.errors import StaleStateError
from shared.messages import DraftOpen, DraftRound, TreeShape
from shared.peer.channel import PeerChannel
from shared.peer.tcp import PeerAddress

if TYPE_CHECKING:
    from shared.grammar.matcher import OutputMatcher


class DeviceTree(NamedTuple):
    """A tree that the draft's device posts to a mailbox, where the target's device waits for it.

    Args:
        slot: Place in the mailbox of the request's target.
        round_tag: Of the tree's round.
        shape: Of the tree.
        following: Of the tree after it, which the device grows by itself; None: it grows none.
    """

    slot: int
    round_tag: int
    shape: TreeShape
    following: TreeShape | None


class PendingTree(NamedTuple):
    """A tree that was ordered and is not answered yet.

    Args:
        channel: That the order came over, and the tree goes back; None: through the front.
    """

    order: DraftRound
    channel: PeerChannel | None


@dataclass(slots=True, kw_only=True, eq=False)
class PendingDial:
    """A channel that is being opened: until then nobody knows who orders a request's trees.

    Args:
        address: Where to.
        order: The newest one of the orchestrator, which counts if the channel cannot be opened.
    """

    address: PeerAddress
    order: DraftRound | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class DraftRequest:
    """A request: tokens from the orchestrator, features from the target, draft KV of its own.

    Args:
        admission_idx: Counts the requests that were opened; the newest is retracted first.
        req_idx: Row of the page table.
        base: Position of KV index 0.
        tokens: Prompt + output, root last once there is one.
        features: Of the target; None: a standalone draft reads none.
        kv_len: Committed rows (extended with true inputs).
        pending: The newest order, until it is answered.
        device_tree: The newest tree ordered, if the target's device waits for it as well.
        channel: To the target's engine, to which the request is attached; None: it is not.
        dial: Of the channel that is being opened to the target's engine; None: none is.
        is_held: False once the engine has dropped the request.
        matcher: Follows the output in its grammar; None: trees are free.
        matched_len: Tokens that it has followed.
    """

    open: DraftOpen
    admission_idx: int
    req_idx: int
    base: int
    tokens: list[int]
    features: FeatureStream | None = None
    kv_len: int = 0
    pending: PendingTree | None = None
    device_tree: DeviceTree | None = None
    channel: PeerChannel | None = None
    dial: PendingDial | None = None
    is_held: bool = True
    matcher: OutputMatcher | None = None
    matched_len: int = 0

    @property
    def request_id(self) -> str:
        return self.open.request_id

    @property
    def input_shift(self) -> int:
        """Return 1 if row p takes token p + 1 and feature p, 0 if it takes token p alone."""
        return 0 if self.features is None else 1

    @property
    def next_position(self) -> int:
        """Return the position of the next row to extend."""
        return self.base + self.kv_len

    @property
    def num_ready_rows(self) -> int:
        """Return how many rows could be extended now."""
        end = len(self.tokens)
        if self.features is not None:
            end = min(end - 1, self.features.end)
        return max(end - self.base - self.kv_len, 0)

    @property
    def pending_tree(self) -> PendingTree:
        """Return the pending tree, where there is one."""
        assert self.pending is not None
        return self.pending

    @property
    def can_grow(self) -> bool:
        """Return whether the pending tree's root has been extended."""
        if self.pending is None or self.kv_len == 0:
            return False
        root = self.pending.order.seq_len
        return self.base + self.kv_len == (root + 1 if self.features is None else root)

    def follow_grammar(self) -> None:
        """Let the matcher follow the tokens that have come since, or do without it if it cannot:
        the target decides what is right.
        """
        if self.matcher is not None and not self.matcher.accept(self.tokens[self.matched_len :]):
            self.matcher = None
        self.matched_len = len(self.tokens)

    def attach(self, channel: PeerChannel) -> None:
        """Take note of the channel to the target's engine."""
        self.channel = channel
        if self.features is not None:
            self.features.attach(channel)

    def lose_channel(self) -> None:
        """Go on through the front: the orchestrator orders, and the front brings features."""
        self.channel = self.device_tree = None
        if self.pending is not None:
            self.pending = self.pending._replace(channel=None)
        if self.features is not None:
            self.features.lose_channel()

    def accept_order(
        self, order: DraftRound, channel: PeerChannel | None, device_tree: DeviceTree | None
    ) -> bool:
        """Take new committed tokens; they supersede an order that is not answered yet.

        An order that is older than what is held came late, and changes nothing.

        Args:
            channel: That the order came over; None: through the front.
        Returns: False if the order came late.
        Raises: StaleStateError if tokens are missing in between or differ from those held.
        """
        if order.seq_len + 1 < len(self.tokens):
            return False
        offset = order.token_offset
        if offset > len(self.tokens):
            raise StaleStateError(
                f"tokens up to {offset} are missing, have {len(self.tokens)}; "
                "open the request again",
                field="token_offset",
            )
        known = len(self.tokens) - offset
        if list(order.token_ids[:known]) != self.tokens[offset:]:
            raise StaleStateError(
                "the tokens differ from those held; open the request again", field="token_ids"
            )
        self.tokens.extend(order.token_ids[known:])
        if len(self.tokens) != order.seq_len + 1:
            raise StaleStateError(
                f"seq_len is {order.seq_len}, have {len(self.tokens)} tokens", field="seq_len"
            )
        self.pending, self.device_tree = PendingTree(order, channel), device_tree
        return True
