"""Which request brings workers down: the one that several deaths have in common.

A worker that dies or hangs leaves every request that its engine worked on a suspect
(`WorkerSession.suspects`); nearly all of them are bystanders. A request is acquitted of all that
by its next verify round, on any worker: what brings an engine down does so before that.

    first death     the request is tried again like any other, with the others
    second death    of another incarnation, before it was acquitted: if it is the only request that
                    both deaths still have in common, it is guilty; else it will be tried alone:
                    one such request per worker at a time. Workers that go down within a
                    moment may have something else in common: their host, an operator. So it is
                    tried alone then, too, whatever they had in common
    third death     it is guilty

A request that a living worker itself says it cannot serve is its own only suspect.
"""

from __future__ import annotations

import math

from orchestrator.workers import WorkerSession

MOMENT_S = 1.0
"""Workers that go down within it may have their host in common, or who operates them."""
MAX_KILLS = 2
"""Workers that a request may bring down; one more if it is not known which request it was."""


class Suspicion:
    """What one request is suspected of."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._kills: list[WorkerSession] = []
        self._died_s = -math.inf  # when the last of them died, loop time
        self._is_coincidence = False  # the last two of them died within a moment

    @property
    def num_kills(self) -> int:
        """Return the workers that went down with the request since it was last acquitted."""
        return len(self._kills)

    @property
    def needs_trial(self) -> bool:
        """Return whether the request may only be tried where no other such request is."""
        return len(self._kills) >= MAX_KILLS

    @property
    def is_guilty(self) -> bool:
        """Return whether the request must not be tried again."""
        if len(self._kills) < MAX_KILLS:
            return False
        if len(self._kills) > MAX_KILLS:
            return True
        in_common = set.intersection(*(worker.suspects for worker in self._kills))
        return in_common == {self._request_id} and not self._is_coincidence

    def note_death(self, worker: WorkerSession, now_s: float) -> None:
        """Note that a worker died or hung with the request; one incarnation dies once.

        Args:
            now_s: Loop time.
        """
        worker.suspects.add(self._request_id)
        if any(worker.info.incarnation == other.info.incarnation for other in self._kills):
            return
        self._is_coincidence, self._died_s = now_s - self._died_s < MOMENT_S, now_s
        self._kills.append(worker)

    def note_failure(self, worker: WorkerSession) -> None:
        """Note that a worker, which lives on, failed to serve just this request."""
        worker.suspects.add(self._request_id)
        self._kills.append(worker)
        self._is_coincidence = False

    def acquit(self, worker: WorkerSession) -> None:
        """Forget everything: the request has run a verify round on a worker.

        Mutates: the suspects of the workers that went down; the trial on this one, if there is one.
        """
        if not self._kills:
            return
        for killed in self._kills:
            killed.suspects.discard(self._request_id)
        self._kills.clear()
        worker.end_trial(self._request_id)
