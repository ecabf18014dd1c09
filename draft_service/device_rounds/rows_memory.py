"""Memory of the draft's GPU where targets on other GPUs of the host write feature rows of paths.

The draft offers it as the first thing that it says on a channel, and the target answers before it
sends any path: so which of the two places has the rows of a channel's paths is known before any is
read, and stays so.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from shared.messages import RowsOffer
from shared.peer.device_memory import Lent, PeerMemory
from shared.peer.mailbox import MailboxEnd
from shared.peer.shared_files import MAILBOXES, RING_DIR, mailbox_name

logger = logging.getLogger(__name__)


class LentRows:
    """What is lent to targets, by the name at which each listens.

    It stays as long as its target lives, whatever becomes of channels to it: a target says nothing
    when it has unmapped memory, but holds the lock of its mailbox until it dies. If it is attached
    to again it gets the same memory.
    """

    def __init__(self, memory: PeerMemory, directory: Path = RING_DIR) -> None:
        self._memory = memory
        self._directory = directory
        self._by_target: dict[str, Lent] = {}
        self._with_channel: set[str] = set()

    def offer(self, socket_name: str, mailbox: MailboxEnd) -> RowsOffer | None:
        """Return what to offer a target; None: nothing, its rows come through its mailbox."""
        self._free_of_dead()
        if mailbox.rows is None or not mailbox.may_lend_rows:
            return None
        num_bytes = mailbox.rows.nbytes
        lent = self._by_target.get(socket_name)
        if lent is None:
            try:
                lent = self._memory.lend(num_bytes)
            except OSError as error:
                logger.info("feature rows come through the host's memory: %s", error)
                return None
            self._by_target[socket_name] = lent
        self._with_channel.add(socket_name)
        return RowsOffer(handle=lent.handle, gpu=self._memory.gpu, num_bytes=num_bytes)

    def leave(self, socket_name: str) -> None:
        """Take note that the channel to a target is gone: no path of it is taken any more."""
        self._with_channel.discard(socket_name)

    def in_use(self, socket_name: str, mailbox: MailboxEnd) -> MailboxEnd:
        """Return a target's mailbox with the rows where it will write them: it has taken them."""
        lent, rows = self._by_target[socket_name], mailbox.rows
        assert rows is not None
        logger.info("feature rows come straight into this GPU's memory")
        return replace(mailbox, rows=lent.data.view(rows.dtype).view(rows.shape))

    def refused(self, socket_name: str) -> None:
        """Free what a target has not mapped."""
        logger.info("feature rows come through the host's memory: the target's log says why")
        self._free(socket_name)

    def _free_of_dead(self) -> None:
        """Free what was lent to targets that have died: they have it mapped no longer. Of one whose
        channel is still there, paths may come that were posted before.
        """
        for name in self._by_target.keys() - self._with_channel:
            if not MAILBOXES.is_held(self._directory, mailbox_name(name)):
                self._free(name)

    def _free(self, socket_name: str) -> None:
        self._with_channel.discard(socket_name)
        try:
            self._by_target.pop(socket_name).free()
        except OSError as error:
            logger.warning("memory of this GPU is not freed: %s", error)
