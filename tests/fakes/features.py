"""The part of a fake target that keeps features: rows for subscribers, in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidArgumentError, StaleStateError
from shared.messages import (
    AcceptedPath,
    FeatureAck,
    FeatureChunk,
    FeatureSubscribe,
    FeatureUnsubscribe,
    PeerTrees,
    RingSpan,
    TargetOpen,
)
from shared.peer.ring import FeatureRing
from tests.fakes.engine import FakeEngine
from tests.fakes.model import WIDTH, feature_rows


@dataclass(eq=False)
class HeldRequest:
    """A request on a fake target."""

    open: TargetOpen
    tokens: list[int]
    seq_len: int = 0
    round_idx: int = -1
    last_reply: AcceptedPath | None = None
    next_feature: int | None = None  # None: nobody subscribes
    reads_ring: bool = False
    acknowledged: int = 0
    credit_until: int = 0
    trees: PeerTrees | None = None  # that rounds by credit may have
    ready_at: float = 0.0  # when the next round by credit may begin
    draft_epoch: int = 0  # of the draft that is attached; 0: none
    is_caught_up: bool = False
    is_resting: bool = False  # no trees of it are wanted
    asked_round: int | None = None  # whose tree was ordered of a draft that is behind
    num_tokens_sent: int = 0
    ordered_round: int = 0
    last_credited_round: int = 0

    @property
    def has_root_only_round(self) -> bool:
        """Return whether the next round needs neither an order nor a tree."""
        is_waiting = self.peer_trees is not None and self.is_caught_up
        return not is_waiting and 0 <= self.round_idx < self.credit_until

    @property
    def peer_trees(self) -> PeerTrees | None:
        """Return the trees that may be ordered of the draft that is attached."""
        is_its = self.trees is not None and self.trees.draft_epoch == self.draft_epoch
        return self.trees if is_its else None


@dataclass(eq=False)
class FakeFeatures(FakeEngine[HeldRequest]):
    """Send the rows of committed tokens to the draft that subscribed.

    Args:
        rows_per_chunk: Feature rows per FeatureChunk.
        has_features: Whether requests keep features at all.
        width: Of a row.
        ring: Carries rows to subscribers that can read it.
    """

    rows_per_chunk: int = 16
    has_features: bool = True
    width: int = WIDTH
    ring: FeatureRing | None = None

    def __post_init__(self) -> None:
        self._early: dict[str, FeatureSubscribe] = {}

    def follow_reader(self, message: FeatureAck | FeatureUnsubscribe) -> None:
        """Take note of what a draft has read, or that it reads no more."""
        held = self.held(message)
        if isinstance(message, FeatureUnsubscribe):
            self._early.pop(message.request_id, None)
            if held is not None:
                held.next_feature = None
        elif held is not None:
            held.acknowledged = max(held.acknowledged, message.position)

    def subscribe(self, message: FeatureSubscribe) -> None:
        """Send rows from a position on; a subscription may come before its request.

        Raises: CoppiceError if that cannot be.
        """
        request = self.requests.get(message.request_id)
        if request is None or request.open.target_epoch < message.target_epoch:
            self._early[message.request_id] = message
            return
        if request.open.target_epoch > message.target_epoch:
            raise StaleStateError("that epoch is over", field="target_epoch")
        if not (self.has_features and request.open.wants_features):
            raise InvalidArgumentError("this request keeps no features", field="request_id")
        if message.from_position > len(request.tokens):
            raise InvalidArgumentError("past the end", field="from_position")
        request.next_feature = message.from_position
        request.reads_ring = self.ring is not None and message.ring_nonce == self.ring.nonce
        self.send_features(request)

    def subscribe_early(self, request_id: str) -> None:
        """Take the subscription that came before its request, if one did."""
        early = self._early.pop(request_id, None)
        if early is not None:
            self.handle(early)

    def send_features(self, request: HeldRequest) -> None:
        """Send the rows that were committed since the last time."""
        if request.next_feature is None:
            return
        while request.next_feature < request.seq_len:
            end = min(request.next_feature + self.rows_per_chunk, request.seq_len)
            data = feature_rows(request.tokens, request.next_feature, end, self.width)
            self.outbox.append(
                FeatureChunk(
                    request_id=request.open.request_id,
                    target_epoch=request.open.target_epoch,
                    start=request.next_feature,
                    shape=(end - request.next_feature, self.width),
                    dtype="float32",
                    data=self.to_ring(data) if request.reads_ring else data,
                )
            )
            request.next_feature = end

    def to_ring(self, data: bytes) -> RingSpan:
        """Put rows where a draft can read them."""
        assert self.ring is not None
        self.ring.start_step()
        span = self.ring.write(np.frombuffer(data, np.uint8).reshape(1, -1))
        assert span is not None
        return span
