"""The owner of all feature streams in the engine: who gets which rows, in what order, and how.

Rows go to one subscriber of a request: over the channel of an attached draft, or through the front.
They go in order of position, without gaps: rows that are gone are replayed first. They travel in
the feature ring, or else in chunks of at most MAX_CHUNK_BYTES.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from shared.device import DTYPES
from shared.errors import InvalidArgumentError, NotFoundError, StaleStateError
from shared.messages import (
    MAX_CHUNK_BYTES,
    FeatureAck,
    FeatureChunk,
    FeatureSpec,
    FeatureSubscribe,
    FeatureUnsubscribe,
    RingRows,
    RingSpan,
)
from shared.peer.channel import PeerChannel
from shared.peer.ring import FeatureRing
from target_service.feature_log import FeatureLog, FeatureRows
from target_service.request import TargetRequest

logger = logging.getLogger(__name__)

MAX_EARLY_SUBSCRIPTIONS = 4096


class FeatureOutlet:
    """Subscriptions to the features of an engine's requests, and what is sent to them.

    Args:
        requests: Of the engine, by request_id.
        outbox: Takes chunks for subscribers at the front.
        spec: What a row is; width 0: the target captures none.
        retain_rows: Rows kept per request until acknowledged.
        ring: Carries rows to drafts on this host; None: rows travel in the messages.
    """

    def __init__(
        self,
        requests: Mapping[str, TargetRequest],
        outbox: list[Any],
        spec: FeatureSpec,
        *,
        retain_rows: int,
        ring: FeatureRing | None,
    ) -> None:
        self.ring = ring
        self._requests = requests
        self._outbox = outbox
        self._spec = spec
        self._retain_rows = retain_rows
        row_bytes = spec.width * DTYPES[spec.dtype].itemsize if spec.width else 0
        self._rows_per_chunk = max(1, MAX_CHUNK_BYTES // row_bytes) if row_bytes else 0
        self.early_subscriptions: dict[str, FeatureSubscribe] = {}

    # --- subscribers -----------------------------------------------------------------------------

    def start(self, request: TargetRequest) -> FeatureSubscribe | None:
        """Keep the rows of a request that was just opened, if a draft wants them.

        Returns: The subscription that came before the request did.
        """
        if request.open.wants_features and self._spec.width:
            request.features = FeatureLog(retain_rows=self._retain_rows)
        return self.early_subscriptions.pop(request.request_id, None)

    def subscribe(self, message: FeatureSubscribe, channel: PeerChannel | None) -> None:
        """Send a request's rows from a position on.

        Args:
            channel: Where the subscription came from, and the rows go; None: the front.
        Raises: NotFoundError, StaleStateError or InvalidArgumentError.
        """
        request = self._requests.get(message.request_id)
        if request is None or request.target_epoch < message.target_epoch:
            if channel is not None:
                raise NotFoundError(f"no request {message.request_id!r} here", field="request_id")
            # The draft's open may overtake the target's: keep the subscription for it.
            if len(self.early_subscriptions) >= MAX_EARLY_SUBSCRIPTIONS:
                self.early_subscriptions.pop(next(iter(self.early_subscriptions)))
            self.early_subscriptions[message.request_id] = message
            return
        log = _subscribable(request, message, channel)
        reads_ring = self.ring is not None and message.ring_nonce == self.ring.nonce
        if message.ring_nonce and not reads_ring:
            logger.warning("a draft read another feature ring than this target's; it gets bytes")
        request.newest_draft_epoch = max(request.newest_draft_epoch, message.draft_epoch)
        log.subscribe(message.from_position, reads_ring=reads_ring, channel=channel)
        self._send(request, log)

    def unsubscribe(self, message: FeatureUnsubscribe) -> None:
        """Send no more rows to a subscriber at the front."""
        early = self.early_subscriptions.get(message.request_id)
        if early is not None and early.target_epoch <= message.target_epoch:
            del self.early_subscriptions[message.request_id]
        log = self._log_of(message, None)
        if log is not None:
            log.unsubscribe()

    def acknowledge(self, message: FeatureAck, channel: PeerChannel | None) -> None:
        """Drop rows that the subscriber has."""
        log = self._log_of(message, channel)
        if log is not None:
            log.acknowledge(message.position)

    def detach(self, request: TargetRequest, channel: PeerChannel) -> None:
        """End a subscription over a channel that is gone; its draft subscribes at the front."""
        if request.features is not None and request.features.channel is channel:
            request.features.unsubscribe()

    def _log_of(
        self, message: FeatureAck | FeatureUnsubscribe, channel: PeerChannel | None
    ) -> FeatureLog | None:
        """Return the rows that a message is about, if they go where the message came from."""
        request = self._requests.get(message.request_id)
        if request is None or request.target_epoch != message.target_epoch:
            return None
        log = request.features
        return log if log is not None and log.channel is channel else None

    # --- rows ------------------------------------------------------------------------------------

    def commit_replay(self, request: TargetRequest, position: int, rows: FeatureRows) -> None:
        """Send the rows of a replay, unless the request was subscribed to anew meanwhile."""
        log = request.features
        assert log is not None
        if log.next == position:
            self._emit(request, log, position, rows)
            log.next = position + len(rows)

    def send(self) -> None:
        """Send what every subscriber has not got yet, and drop rows past the budget."""
        for request in self._requests.values():
            log = request.features
            if log is not None:
                self._send(request, log)
                # A replay in flight ends where the rows held begin: they must stay meanwhile.
                if not log.is_replaying:
                    log.trim()
        if self.ring is not None:
            self.ring.start_step()

    def can_send_early(self, request: TargetRequest, position: int) -> bool:
        """Return whether rows at a position may go to the attached draft before their commit."""
        log = request.features
        if log is None:
            return True
        is_next = log.next == position == log.end
        is_attached = request.draft is not None and log.channel is request.draft.channel
        return self.ring is not None and is_next and is_attached

    def claim_early(
        self, requests: Sequence[TargetRequest], num_rows: Sequence[int]
    ) -> RingRows | None:
        """Make room in the ring for the rows of accepted paths, which are not committed yet.

        Args:
            num_rows: Of each request, from its next position on.
        Returns: Where `write_early` is to put them, one request after the other; None if they are
            too many for the ring.
        """
        assert self.ring is not None
        shape = (sum(num_rows), self._spec.width)
        row_bytes = self._spec.width * DTYPES[self._spec.dtype].itemsize
        span = self.ring.claim(shape[0] * row_bytes)
        if span is None:
            return None
        for request, count in zip(requests, num_rows, strict=True):
            assert request.features is not None and request.features.next is not None
            request.features.next += count
        return RingRows(shape=shape, dtype=self._spec.dtype, data=span)

    def write_early(self, place: RingRows, parts: Sequence[FeatureRows]) -> None:
        """Write rows where `claim_early` made room for them."""
        assert self.ring is not None and isinstance(place.data, RingSpan)
        self.ring.fill(place.data, parts)

    def _send(self, request: TargetRequest, log: FeatureLog) -> None:
        for position, rows in log.take_unsent():
            self._emit(request, log, position, rows)

    def _emit(
        self, request: TargetRequest, log: FeatureLog, position: int, rows: FeatureRows
    ) -> None:
        """Queue rows for the subscriber, in chunks."""
        ring = self.ring if log.reads_ring else None
        put = self._outbox.append if log.channel is None else log.channel.put
        for begin in range(0, len(rows), self._rows_per_chunk):
            part = rows[begin : begin + self._rows_per_chunk]
            span = ring.write(part) if ring is not None else None
            put(
                FeatureChunk(
                    request_id=request.request_id,
                    target_epoch=request.target_epoch,
                    start=position + begin,
                    shape=(len(part), self._spec.width),
                    dtype=self._spec.dtype,
                    data=part.tobytes() if span is None else span,
                )
            )


def _subscribable(
    request: TargetRequest, message: FeatureSubscribe, channel: PeerChannel | None
) -> FeatureLog:
    """Return the rows that a subscription asks for.

    Raises: StaleStateError or InvalidArgumentError.
    """
    if request.target_epoch > message.target_epoch:
        raise StaleStateError(f"target_epoch {message.target_epoch} is over", field="target_epoch")
    is_attached = request.draft is not None and request.draft.channel is channel
    is_older = 0 < message.draft_epoch < request.newest_draft_epoch
    if is_older or (channel is not None and not is_attached):
        raise StaleStateError(
            "a newer draft takes this request's features", reason="SUBSCRIPTION_REPLACED"
        )
    log = request.features
    if log is None:
        raise InvalidArgumentError(
            "this request keeps no features; open it with wants_features on a target that "
            "was started with the draft's checkpoint",
            field="request_id",
        )
    if not 0 <= message.from_position <= len(request.tokens):
        raise InvalidArgumentError(
            f"from_position is {message.from_position}, expected 0..{len(request.tokens)}",
            field="from_position",
        )
    return log
