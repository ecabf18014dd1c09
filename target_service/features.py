"""Send each request's feature rows to the draft that has subscribed to them.

A request has one subscriber: an attached draft, over its peer channel; or a draft on the front's
StreamFeatures. Rows are sent in order of position, without gaps: rows that are no longer kept are
computed again first (a replay). The bytes of the rows are written to the feature ring (shared
memory) if the draft reads it, and a message names their place; else the message carries them.

Per request the state is a `FeatureLog`. While a request rests (resting.py), its rows are held back:

    hold_back ─▶ rows are kept in `rested` ──────────────▶ wake ─▶ send: `_release`, up to
        └─▶ keep_none: rows are not kept at all (dormant) ──┘      WOKEN_ROWS rows a step
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shared.device import DTYPES
from shared.errors import InvalidArgumentError, NotFoundError, StaleStateError
from shared.messages import (
    MAX_CHUNK_BYTES,
    FeatureAck,
    FeatureChunk,
    FeatureSpec,
    FeatureSubscribe,
    FeatureUnsubscribe,
    PathRows,
    RingSpan,
)
from shared.peer.channel import PeerChannel
from shared.peer.ring import FeatureRing
from target_service.feature_log import FeatureLog, FeatureRows
from target_service.request import Phase, TargetRequest
from target_service.resting_rows import RestedPath, RestedRows, RestedRun

logger = logging.getLogger(__name__)

MAX_EARLY_SUBSCRIPTIONS = 4096
# Most rows, and bytes, of waking requests that are sent with one step: hosts copy these rows while
# other requests wait for the next step, and a draft reads them in a round or two.
WOKEN_ROWS, _WOKEN_BYTES = 1024, 8 << 20


class MissedRows(NamedTuple):
    """Rows that a request's draft would need if the request stopped resting now.

    Args:
        num_kept: Rows that are kept, in the request's log or in RestedRows.
        num_replayed: Rows that would have to be computed again.
    """

    num_kept: int = 0
    num_replayed: int = 0


_NOTHING_MISSED = MissedRows()


class FeatureOutlet:
    """Owns the subscriptions to features of an engine's requests, and sends the rows.

    Args:
        requests: All requests of the engine, by request_id.
        outbox: Takes chunks for subscribers at the front.
        spec: Width and dtype of a row; width 0: the target captures no features.
        retain_rows: Rows kept per request until they are acknowledged, but for those that are sent
            with an order.
        ring: Carries rows to drafts on this host; None: messages carry the rows.
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
        self.rows_per_chunk = max(1, MAX_CHUNK_BYTES // row_bytes) if row_bytes else 0
        """Most rows in one message."""
        self.early_subscriptions: dict[str, FeatureSubscribe] = {}
        self.row_bytes = row_bytes
        self.num_bytes = dict.fromkeys(("ring", "peer", "front"), 0)
        """Bytes of rows that were sent: through the ring, in peer messages, in front messages."""
        self.rested = RestedRows(row_bytes)
        """Rows of resting requests."""
        self._waking: dict[str, TargetRequest] = {}

    # --- subscribers -----------------------------------------------------------------------------

    def start(self, request: TargetRequest) -> FeatureSubscribe | None:
        """Begin to keep the rows of a request that was just opened, if a draft will want them.

        Returns: The subscription, if it came before the request was opened.
        """
        if request.open.wants_features and self._spec.width:
            request.features = FeatureLog(retain_rows=self._retain_rows)
        return self.early_subscriptions.pop(request.request_id, None)

    def subscribe(self, message: FeatureSubscribe, channel: PeerChannel | None) -> None:
        """Begin to send a request's rows, from the position that the message names.

        Args:
            channel: Where the subscription came from and the rows go; None: the front.
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
        """End the subscription of a draft at the front."""
        early = self.early_subscriptions.get(message.request_id)
        if early is not None and early.target_epoch <= message.target_epoch:
            del self.early_subscriptions[message.request_id]
        log = self._log_of(message, None)
        if log is not None:
            log.unsubscribe()

    def acknowledge(self, message: FeatureAck, channel: PeerChannel | None) -> None:
        """Drop the rows that the subscriber has acknowledged."""
        log = self._log_of(message, channel)
        if log is not None:
            log.acknowledge(message.position)

    def detach(self, request: TargetRequest, channel: PeerChannel) -> None:
        """End a subscription over a channel that has closed; its draft subscribes at the front."""
        if request.features is not None and request.features.channel is channel:
            request.features.unsubscribe()

    def _log_of(
        self, message: FeatureAck | FeatureUnsubscribe, channel: PeerChannel | None
    ) -> FeatureLog | None:
        """Return the log that a message is about, if its subscriber is the message's sender."""
        request = self._requests.get(message.request_id)
        if request is None or request.target_epoch != message.target_epoch:
            return None
        log = request.features
        return log if log is not None and log.channel is channel else None

    # --- rows ------------------------------------------------------------------------------------

    def commit_replay(self, request: TargetRequest, position: int, rows: FeatureRows) -> None:
        """Send the rows of a replay, unless a new subscription wants other rows next."""
        log = request.features
        assert log is not None
        if log.next == position:
            self._emit(request, log, position, rows)
            log.next = position + len(rows)

    def keep_rested(self, paths: Sequence[RestedPath], features: FeatureRows) -> None:
        """Keep the rows of the paths of resting requests.

        Args:
            features: [B, D + 1, row_bytes], the rows of all paths of the step.
        """
        self.rested.append(paths, features)

    def keep_rested_chunk(self, request: TargetRequest, position: int, rows: FeatureRows) -> None:
        """Keep the rows of a prompt chunk of a request that is held back.

        They go to `rested`, whose size does not depend on the length of prompts. The copy frees the
        step's buffer.
        """
        log = request.features
        assert log is not None
        if log.rested_since is None:
            log.rested_since = self.rested.end
        path = RestedPath(0, request.req_idx, position, len(rows))
        self.rested.append([path], rows[None])

    def hold_back(self, request: TargetRequest) -> None:
        """Send no rows of a request until `wake`: it rests."""
        log = request.features
        if log is None:
            return
        log.is_held_back = True
        self._waking.pop(request.request_id, None)
        if request.phase is Phase.RUNNING and log.rested_since is None and not log.is_dormant:
            log.rested_since = self.rested.end

    def keep_none(self, request: TargetRequest) -> None:
        """Do not even keep the rows of a request that is held back: nobody is likely to want them.
        A step of such requests alone copies no rows to the host.
        """
        log = request.features
        if log is None or log.is_dormant or not log.is_held_back:
            return
        if request.request_id not in self._waking:
            log.is_dormant, log.rested_since = True, None
            log.skip_to(log.end)

    def missed(self, request: TargetRequest) -> MissedRows:
        """Return which rows a request's draft would need if the request stopped resting now."""
        log = request.features
        if log is None:
            return _NOTHING_MISSED
        if log.is_dormant:
            return MissedRows(num_replayed=request.committed_len - (log.next or 0))
        if log.rested_since is None:
            return _NOTHING_MISSED
        first = log.end if log.next is None else log.next
        num_missed = request.committed_len - first
        if first >= log.start and self.rested.has_all(log.rested_since):
            return MissedRows(num_kept=num_missed)
        return MissedRows(num_replayed=num_missed)

    def wake(self, request: TargetRequest, *, at_once: bool = False) -> None:
        """Send the rows of a request that were held back, with one of the next steps.

        Args:
            at_once: Send them now: the request may have no step before its draft has these rows.
        """
        log = request.features
        if log is None or not log.is_held_back:
            return
        if at_once:
            self._waking.pop(request.request_id, None)
            self._release(request, log)
            self._send(request, log)
        else:
            self._waking[request.request_id] = request

    def send(self) -> None:
        """Send each subscriber the rows it has not got yet, and drop rows past `retain_rows`."""
        self._wake_some()
        has_rested = False
        for request in self._requests.values():
            log = request.features
            if log is None:
                continue
            has_rested |= log.rested_since is not None
            if log.is_settled:
                continue
            self._send(request, log)
            # A replay in flight ends where the kept rows begin: these must stay meanwhile.
            if not log.is_replaying:
                log.trim()
        if not has_rested:
            self.rested.restart()
        if self.ring is not None:
            self.ring.start_step()

    def _wake_some(self) -> None:
        """Release the rows of waking requests, as many rows as one step may send."""
        num_rows = min(WOKEN_ROWS, _WOKEN_BYTES // max(self.row_bytes, 1))
        while self._waking and num_rows > 0:
            request_id = next(iter(self._waking))
            request = self._waking.pop(request_id)
            log = request.features
            if log is not None and self._requests.get(request_id) is request:
                num_rows -= sum(self.missed(request))
                self._release(request, log)

    def _release(self, request: TargetRequest, log: FeatureLog) -> None:
        """End the rest of a request: send its kept rows, or have its log skip them, so that they
        are replayed.
        """
        log.is_held_back = False
        if log.is_dormant:
            log.is_dormant = False
            log.skip_to(request.committed_len)
        since, log.rested_since = log.rested_since, None
        if since is None:
            return
        run, end = self.rested.newest(request.req_idx, since), request.committed_len
        if run is None or run.position + len(run.places) != end:
            if log.end < end:
                log.skip_to(end)  # some were overwritten: all are replayed
            return
        self._send(request, log)
        if log.next == log.end == run.position:
            self._emit_rested(request, log, run)
            log.skip_to(end)
            log.next = end
        else:  # earlier rows must be replayed first, or nobody has subscribed yet
            log.append_rested(run.position, self.rested.copy(run.places))

    def can_send_early(self, request: TargetRequest, position: int) -> bool:
        """Return whether rows from a position on may be sent to the attached draft before they are
        committed.
        """
        log = request.features
        if log is None:
            return True
        is_next = log.next == position == log.end and not log.is_dormant
        is_attached = request.draft is not None and log.channel is request.draft.channel
        has_way = self.ring is not None or not log.reads_ring
        return has_way and is_next and is_attached

    def take_early(
        self, requests: Sequence[TargetRequest], parts: Sequence[FeatureRows]
    ) -> PathRows | None:
        """Return the rows of accepted paths, which are not committed yet, as bytes.

        Args:
            parts: The rows of each request, from its next position on.
        Returns: None if there are too many rows for a message.
        """
        num_rows = sum(map(len, parts))
        if num_rows > self.rows_per_chunk:
            return None
        self._advance(requests, [len(part) for part in parts])
        self.num_bytes["peer"] += num_rows * self.row_bytes
        shape = (num_rows, self._spec.width)
        data = b"".join([part.tobytes() for part in parts])
        return PathRows(shape=shape, dtype=self._spec.dtype, data=data)

    def claim_early(
        self, requests: Sequence[TargetRequest], num_rows: Sequence[int]
    ) -> PathRows | None:
        """Make room in the ring for the rows of accepted paths, which are not committed yet.

        Args:
            num_rows: Number of rows of each request, from its next position on.
        Returns: The room, for `write_early` to fill one request after the other; None if there are
            too many rows for the ring.
        """
        assert self.ring is not None
        shape = (sum(num_rows), self._spec.width)
        span = self.ring.claim(shape[0] * self.row_bytes)
        if span is None:
            return None
        self.num_bytes["ring"] += shape[0] * self.row_bytes
        self._advance(requests, num_rows)
        return PathRows(shape=shape, dtype=self._spec.dtype, data=span)

    def write_early(self, place: PathRows, parts: Sequence[FeatureRows]) -> None:
        """Write rows into the room that `claim_early` has made."""
        assert self.ring is not None and isinstance(place.data, RingSpan)
        self.ring.fill(place.data, parts)

    @staticmethod
    def _advance(requests: Sequence[TargetRequest], num_rows: Sequence[int]) -> None:
        """Note that the next rows of requests have been sent."""
        for request, count in zip(requests, num_rows, strict=True):
            assert request.features is not None and request.features.next is not None
            request.features.next += count

    def _send(self, request: TargetRequest, log: FeatureLog) -> None:
        for position, rows in log.take_unsent():
            self._emit(request, log, position, rows)

    def _emit(
        self, request: TargetRequest, log: FeatureLog, position: int, rows: FeatureRows
    ) -> None:
        """Queue rows for the subscriber, in chunks."""
        ring = self.ring if log.reads_ring else None
        for begin in range(0, len(rows), self.rows_per_chunk):
            part = rows[begin : begin + self.rows_per_chunk]
            span = ring.write(part) if ring is not None else None
            data = part.tobytes() if span is None else span
            self._put(request, log, position + begin, len(part), data)

    def _emit_rested(self, request: TargetRequest, log: FeatureLog, run: RestedRun) -> None:
        """Queue rows that were kept while a request rested, in chunks."""
        ring = self.ring if log.reads_ring else None
        for begin in range(0, len(run.places), self.rows_per_chunk):
            places = run.places[begin : begin + self.rows_per_chunk]
            span = ring.claim(len(places) * self.row_bytes) if ring is not None else None
            if ring is None or span is None:
                data: bytes | RingSpan = self.rested.copy(places).tobytes()
            else:
                self.rested.copy(places, out=ring.at(span).reshape(-1, self.row_bytes))
                data = span
            self._put(request, log, run.position + begin, len(places), data)

    def _put(
        self,
        request: TargetRequest,
        log: FeatureLog,
        position: int,
        num_rows: int,
        data: bytes | RingSpan,
    ) -> None:
        """Queue a chunk for the subscriber.

        Args:
            data: The rows, or where they lie in the ring.
        """
        way = "front" if log.channel is None else "peer"
        self.num_bytes["ring" if isinstance(data, RingSpan) else way] += num_rows * self.row_bytes
        put = self._outbox.append if log.channel is None else log.channel.put
        put(
            FeatureChunk(
                request_id=request.request_id,
                target_epoch=request.target_epoch,
                start=position,
                shape=(num_rows, self._spec.width),
                dtype=self._spec.dtype,
                data=data,
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
