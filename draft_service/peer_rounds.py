"""Rounds that a target's engine orders, over a peer channel.

The target's engine sends what a step accepted of its requests, with the orders of their next trees,
as one PathBatch; the trees of a step of the draft go back as one TreeBatch (answers.py). A channel
that breaks takes its requests back to relayed rounds.

A target on this host has a socket, which is opened at once. To another host a channel is dialled,
which takes a while: requests that wait for it are decided on when that ends (`note_dialled`).
"""

from __future__ import annotations

import logging

from draft_service.features import FeatureReader, FeatureRows
from draft_service.path_source import PathSource
from draft_service.request import DraftRequest, PendingDial
from draft_service.request_table import RequestTable
from shared.errors import CoppiceError
from shared.messages import DraftOpen, DraftRound, PathBatch, PathEntry, PeerAttach
from shared.peer.channel import PeerChannel, PeerChannels, connect
from shared.peer.tcp import PeerAddress, TcpDialer
from shared.rpc.protocol import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

_BENEFIT = "rounds and features go from engine to engine"


class PeerRounds:
    """Attaches requests to targets' engines and takes what these say of several requests at once.

    Args:
        channels: Of the engine; channels that are opened are added.
        dialer: Calls `note_dialled`; a source of these channels.
        source: Of paths that the device has first.
    """

    def __init__(
        self,
        requests: RequestTable,
        reader: FeatureReader,
        channels: PeerChannels,
        dialer: TcpDialer,
        source: PathSource,
    ) -> None:
        self._requests = requests
        self._reader = reader
        self._channels = channels
        self._dialer = dialer
        self._source = source
        self._by_name: dict[str | PeerAddress, PeerChannel] = {}

    def connect(self, request: DraftRequest) -> None:
        """Attach a request to its target's engine, if that can be reached, and ask for features."""
        message = request.open
        channel = self._channel_to(message.target_socket)
        if channel is None and message.target_peer_address:
            address = _address_of(message)
            channel = self._by_name.get(address) if address is not None else None
            if channel is None and address is not None and self._dialer.dial(address):
                request.dial = PendingDial(address=address)
                return
        self._begin(request, channel)

    def note_dialled(self, address: PeerAddress, channel: PeerChannel | None) -> None:
        """Decide on the requests that wait for a channel.

        Args:
            channel: None: it could not be opened, and their rounds are relayed.
        """
        if channel is not None:
            logger.info("attached to port %d of %s: %s", address.port, address.host, _BENEFIT)
            self._by_name[address] = channel
        for request in list(self._requests.values()):
            dial = request.dial
            if dial is None or dial.address != address:
                continue
            request.dial = None
            self._begin(request, channel)
            if channel is None and dial.order is not None:
                try:
                    self._requests.take_order(request, dial.order, None)
                except CoppiceError as error:
                    self._requests.fail(dial.order, error)

    def keep_order(self, request: DraftRequest, order: DraftRound) -> bool:
        """Return whether an order is not to be followed: the target orders, or may do so soon."""
        if request.dial is not None:
            request.dial.order = order
        return request.channel is not None or request.dial is not None

    def take_paths(self, channel: PeerChannel, batch: PathBatch) -> None:
        """Take what a step of the target accepted of several requests, and its orders.

        A part that is wrong fails its own request.
        """
        rows: FeatureRows | None = None
        if batch.rows is not None:
            try:
                self._reader.check(batch.rows)
            except CoppiceError as error:
                self._fail_all(batch, error)
                return
            rows = self._reader.read(batch.rows)
        first = 0
        for part in batch.parts:
            stop = first + len(part.token_ids)
            request = self._expecting(part)
            if request is not None:
                try:
                    self._take_order(request, part, batch, channel)
                except CoppiceError as error:
                    self._requests.fail(part, error)
                else:
                    if batch.rows is not None and request.features is not None:
                        own_rows = None if rows is None else rows.part(first, stop)
                        request.features.receive(part.seq_len, own_rows)
            first = stop

    def lose(self, channel: PeerChannel) -> None:
        """Go on without a channel that broke."""
        for name in [name for name, known in self._by_name.items() if known is channel]:
            del self._by_name[name]
        self._source.disconnect(channel)
        for request in self._requests.values():
            if request.channel is channel:
                request.lose_channel()

    def _take_order(
        self, request: DraftRequest, part: PathEntry, batch: PathBatch, channel: PeerChannel
    ) -> None:
        order = DraftRound(
            request_id=part.request_id,
            target_epoch=part.target_epoch,
            draft_epoch=part.draft_epoch,
            round_idx=part.round_idx,
            seq_len=part.seq_len + len(part.token_ids),
            token_offset=part.seq_len + 1,
            token_ids=tuple(part.token_ids),
            shape=batch.shape,
        )
        tree = self._source.place_tree(channel, part, batch.shape, batch.following)
        self._requests.take_order(request, order, channel, tree)

    def _begin(self, request: DraftRequest, channel: PeerChannel | None) -> None:
        """Attach a request to its target's engine, or not, and ask for its features there."""
        message = request.open
        if channel is not None:
            request.attach(channel)
            channel.put(
                PeerAttach(
                    request_id=message.request_id,
                    target_epoch=message.target_epoch,
                    draft_epoch=message.draft_epoch,
                    has_mailbox=self._source.has_mailbox(channel),
                    num_tokens=len(request.tokens),
                    protocol_version=PROTOCOL_VERSION,
                    streams_wait=self._source.streams_wait(channel),
                )
            )
        if request.features is not None:
            request.features.subscribe()

    def _channel_to(self, name: str) -> PeerChannel | None:
        """Return the channel to a target's socket; None if that is on another host, or has none."""
        channel = self._by_name.get(name)
        if channel is None and name:
            try:
                channel = connect(name)
            except OSError as error:
                logger.info("no socket of the target's engine is here: %s", error)
                return None
            logger.info("attached to %s: %s", name, _BENEFIT)
            self._by_name[name] = channel
            self._channels.add(channel)
            self._source.connect(name, channel)
        return channel

    def _fail_all(self, batch: PathBatch, error: CoppiceError) -> None:
        for part in batch.parts:
            if self._expecting(part) is not None:
                self._requests.fail(part, error)

    def _expecting(self, part: PathEntry) -> DraftRequest | None:
        return self._requests.expecting(part.request_id, part.target_epoch, part.draft_epoch)


def _address_of(message: DraftOpen) -> PeerAddress | None:
    try:
        return PeerAddress.parse(message.target_peer_address, worker_address=message.target_address)
    except ValueError as error:
        logger.warning("rounds go through the orchestrator: no peer channel: %s", error)
        return None
