"""Which request brings workers down: the one that several deaths have in common.

A worker that dies or hangs leaves every request that its engine worked on a suspect
(`WorkerSession.suspects`); nearly all of them are bystanders. A request is acquitted of all that
by its next verify round, on any worker: what brings an engine down does so before that.

    first death     the request is tried again like any other, with the others
    second death    of another incarnation, before it was acquitted: if it is the only request that
                    both deaths have in common when the second one is heard of, it is guilty; else
                    it will be tried alone: one such request per worker at a time. So is the last
                    of them: that the others were acquitted proves nothing, for the two deaths may
                    have nothing in common at all. Workers that go down within a moment may have
                    something else in common: their host, an operator. So it is tried alone then,
                    too, whatever they had in common
    third death     it is guilty

A session that broke is a death unless the same incarnation answers again: then only a connection
had broken (`fates.py`). Until that is known (SILENCE_S at most, then it counts) nobody waits for
it, and it proves nothing: after the second one the request is tried alone. Only before a
fourth worker is risked the request waits.

A request that a living worker itself says it cannot serve is its own only suspect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from orchestrator.workers import SILENCE_S, Fate, WorkerSession

MOMENT_S = 1.0
"""Workers that go down within it may have their host in common, or who operates them."""
MAX_KILLS = 2
"""Workers that a request may bring down; one more if it is not known which request it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kill:
    """A worker that went down with the request.

    Args:
        died_s: Loop time; None: it lives on, but has failed.
        is_broken: Its session broke, and perhaps nothing else.
        others: Which other requests it had in common with each worker that went down before, as
            this was heard of.
    """

    worker: WorkerSession
    died_s: float | None
    is_broken: bool
    others: Mapping[WorkerSession, Set[str]]

    @property
    def stands(self) -> bool:
        """Return whether it is not refuted."""
        return not (self.is_broken and self.worker.fate is Fate.LIVES)

    def is_proved(self, now_s: float) -> bool:
        """Return whether more than a connection is gone."""
        if not self.is_broken or self.worker.fate is Fate.ENDED:
            return True
        return self.stands and now_s >= self.worker.lost_s + SILENCE_S


class Suspicion:
    """What one request is suspected of."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._kills: list[_Kill] = []

    @property
    def num_kills(self) -> int:
        """Return the workers that went down with the request since it was last acquitted."""
        return len(self._standing)

    @property
    def needs_trial(self) -> bool:
        """Return whether the request may only be tried where no other such request is."""
        return self.num_kills >= MAX_KILLS

    def is_guilty(self, now_s: float) -> bool:
        """Return whether the request must not be tried again.

        Args:
            now_s: Loop time.
        """
        proved = [kill for kill in self._standing if kill.is_proved(now_s)]
        if len(proved) < MAX_KILLS:
            return False
        if len(proved) > MAX_KILLS:
            return True
        first, second = proved
        return not second.others[first.worker] and not _is_coincidence(proved)

    def is_undecided(self, now_s: float) -> bool:
        """Return whether the request must wait until more is known of broken sessions.

        Args:
            now_s: Loop time.
        """
        return self.num_kills > MAX_KILLS and not self.is_guilty(now_s)

    def note_death(self, worker: WorkerSession, now_s: float, *, is_broken: bool = True) -> None:
        """Note that a worker died or hung with the request; one incarnation dies once.

        Args:
            now_s: Loop time.
            is_broken: All that is known is that the session broke.
        """
        worker.suspects.add(self._request_id)
        incarnation = worker.info.incarnation
        if all(incarnation != kill.worker.info.incarnation for kill in self._standing):
            self._note(worker, died_s=now_s, is_broken=is_broken)

    def note_failure(self, worker: WorkerSession) -> None:
        """Note that a worker, which lives on, failed to serve just this request."""
        worker.suspects.add(self._request_id)
        self._note(worker, died_s=None, is_broken=False)

    def acquit(self, worker: WorkerSession) -> None:
        """Forget everything: the request has run a verify round on a worker.

        Mutates: the suspects of the workers that went down; the trial on this one, if there is one.
        """
        if not self._kills:
            return
        for kill in self._kills:
            kill.worker.suspects.discard(self._request_id)
        self._kills.clear()
        worker.end_trial(self._request_id)

    def leave(self, worker: WorkerSession) -> None:
        """Take note that the request has left a worker; that may go on, and has not hung with it.

        Mutates: the suspects of the worker, who may include it because another request hung there.
        """
        incarnation = worker.info.incarnation
        if not worker.is_lost and all(
            incarnation != kill.worker.info.incarnation for kill in self._kills
        ):
            worker.suspects.discard(self._request_id)

    def _note(self, worker: WorkerSession, *, died_s: float | None, is_broken: bool) -> None:
        here = worker.suspects - {self._request_id}
        others = {kill.worker: here & kill.worker.suspects for kill in self._kills}
        self._kills.append(_Kill(worker=worker, died_s=died_s, is_broken=is_broken, others=others))

    @property
    def _standing(self) -> list[_Kill]:
        return [kill for kill in self._kills if kill.stands]


def _is_coincidence(kills: Sequence[_Kill]) -> bool:
    """Return whether the last two workers went down within a moment."""
    before, last = (kill.died_s for kill in kills[-2:])
    return before is not None and last is not None and last - before < MOMENT_S
