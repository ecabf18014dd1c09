"""What became of workers whose sessions have ended: did the process end, or only its connection?

Known by who answers next: the same incarnation, at whatever address, lives on; at the address of
the lost session another incarnation, or a process that has no engine yet, stands in its place.
"""

from __future__ import annotations

import logging
import weakref

from orchestrator.workers import Fate, WorkerSession

logger = logging.getLogger(__name__)


class Fates:
    """The lost sessions that some request still refers to."""

    def __init__(self) -> None:
        self._lost: weakref.WeakSet[WorkerSession] = weakref.WeakSet()

    def note_lost(self, worker: WorkerSession) -> None:
        """Note that a session has ended."""
        self._lost.add(worker)

    def note_answer(self, worker: WorkerSession) -> None:
        """Note that a worker has said who it is.

        Mutates: the fate of lost sessions with it, and with others at its address.
        """
        for lost in self._lost:
            if lost.info.incarnation == worker.info.incarnation:
                if lost.fate is not Fate.LIVES and lost.suspects:
                    logger.warning("%s lives: only its connection had broken", lost)
                lost.fate = Fate.LIVES
        self.note_loading(worker.address)

    def note_loading(self, address: str) -> None:
        """Note that a process without an engine answers at an address.

        Mutates: the fate of lost sessions there.
        """
        for lost in self._lost:
            if lost.address == address and lost.fate is Fate.UNKNOWN:
                lost.fate = Fate.ENDED
