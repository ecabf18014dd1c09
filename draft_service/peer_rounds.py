"""Rounds that a target's engine on this host orders, over a peer channel.

The target's engine sends what a step accepted of its requests, with the orders of their next trees,
as one PathBatch; the trees of a step of the draft go back as one TreeBatch (answers.py). A channel
that breaks takes its requests back to relayed rounds.
"""

from __future__ import annotations

import logging

from draft_service.features import FeatureReader, FeatureRows
from draft_service.path_source import PathSource
from draft_service.request import DraftRequest
from draft_service.request_table import RequestTable
from shared.errors import CoppiceError
from shared.messages import DraftRound, PathBatch, PathEntry, PeerAttach, TreeShape
from shared.peer.channel import PeerChannel, PeerChannels, connect

logger = logging.getLogger(__name__)


class PeerRounds:
    """Attaches requests to targets' engines and takes what these say of several requests at once.

    Args:
        channels: Of the engine; channels that are opened are added.
        source: Of paths that the device has first.
    """

    def __init__(
        self,
        requests: RequestTable,
        reader: FeatureReader,
        channels: PeerChannels,
        source: PathSource,
    ) -> None:
        self._requests = requests
        self._reader = reader
        self._channels = channels
        self._source = source
        self._by_name: dict[str, PeerChannel] = {}

    def attach(self, request: DraftRequest) -> None:
        """Attach a request to its target's engine, if that is on this host."""
        message = request.open
        channel = self._channel_to(message.target_socket)
        if channel is None:
            return
        request.attach(channel)
        channel.put(
            PeerAttach(
                request_id=message.request_id,
                target_epoch=message.target_epoch,
                draft_epoch=message.draft_epoch,
                has_mailbox=self._source.has_mailbox(channel),
                num_tokens=len(request.tokens),
            )
        )

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
                    self._take_order(request, part, batch.shape, channel)
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
        self, request: DraftRequest, part: PathEntry, shape: TreeShape, channel: PeerChannel
    ) -> None:
        order = DraftRound(
            request_id=part.request_id,
            target_epoch=part.target_epoch,
            draft_epoch=part.draft_epoch,
            round_idx=part.round_idx,
            seq_len=part.seq_len + len(part.token_ids),
            token_offset=part.seq_len + 1,
            token_ids=tuple(part.token_ids),
            shape=shape,
        )
        tree = self._source.place_tree(channel, part.mailbox_slot, part.round_tag, shape)
        self._requests.take_order(request, order, channel, tree)

    def _channel_to(self, name: str) -> PeerChannel | None:
        """Return the channel to a target's engine; None if that is on another host."""
        channel = self._by_name.get(name)
        if channel is None and name:
            try:
                channel = connect(name)
            except OSError as error:
                logger.info(
                    "rounds go through the orchestrator: no channel to the target: %s", error
                )
                return None
            logger.info("attached to %s: rounds and features go from engine to engine", name)
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
