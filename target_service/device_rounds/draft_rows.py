"""Where the feature rows of paths are posted: in the memory of each draft's GPU, or the mailbox."""

from __future__ import annotations

import logging

from shared.messages import RowsAnswer, RowsOffer
from shared.peer.channel import PeerChannel
from shared.peer.device_memory import Borrowed, PeerMemory
from shared.peer.mailbox import Mailbox

logger = logging.getLogger(__name__)


class DraftRows:
    """Memory that drafts lend this target, by channel; what it does not take stays unused.

    It is unmapped after its channel has ended, as it does when the draft dies: for whatever was
    launched before, see device_memory.py.

    Args:
        memory: Of the target's GPU.
    """

    def __init__(self, mailbox: Mailbox, memory: PeerMemory) -> None:
        rows = mailbox.rows
        self._memory = memory
        self._num_bytes = 0 if rows is None else rows.nbytes
        self._in_mailbox = 0 if rows is None else rows.data_ptr()
        self._by_channel: dict[PeerChannel, Borrowed | None] = {}  # None: refused
        self._unused: list[Borrowed] = []

    def take(self, channel: PeerChannel, offer: RowsOffer) -> None:
        """Map what a draft offers, and answer; what cannot be written to is refused.

        Only a channel's first offer counts: there may be paths on the way after that.
        """
        if channel in self._by_channel:
            logger.warning("a draft offers memory for feature rows again; it is not used")
            return
        borrowed: Borrowed | None = None
        try:
            if offer.num_bytes != self._num_bytes:
                raise OSError(f"num_bytes is {offer.num_bytes}, expected {self._num_bytes}")
            borrowed = self._memory.borrow(offer.handle, offer.gpu, offer.num_bytes)
            logger.info("feature rows go straight into the memory of a draft's GPU")
        except OSError as error:
            logger.info("feature rows go through the host's memory: %s", error)
        self._by_channel[channel] = borrowed
        channel.put(RowsAnswer(is_taken=borrowed is not None))

    def address_of(self, channel: PeerChannel | None) -> int:
        """Return where a draft's rows are, [2, S, MAX_PATH, W], for this target's device; 0: drafts
        take none.

        Args:
            channel: To the draft; None: there is none, and nothing will be written.
        """
        borrowed = None if channel is None else self._by_channel.get(channel)
        return self._in_mailbox if borrowed is None else borrowed.address

    def lose(self, channel: PeerChannel) -> None:
        """Use the memory of a draft whose channel has ended no more."""
        borrowed = self._by_channel.pop(channel, None)
        if borrowed is not None:
            self._unused.append(borrowed)

    def unmap_unused(self) -> None:
        """Unmap memory of drafts that are gone; waits for what is in flight, so not while other
        drafts wait for something of this step.
        """
        while self._unused:
            self._unused.pop().close()
