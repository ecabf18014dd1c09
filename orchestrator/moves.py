"""Requests leave workers that drain: a few targets' requests at a time, drafts at once.

A request that leaves its target waits for a prefill of its tokens elsewhere. So only a few are on
their way at any time, each to a target that has room for it, and the others go on where they are.
One whose client must read first leaves, too, but is on its way to nowhere until then. Whatever
has not left when the worker ends is rebuilt then, as after any loss.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.pool import Need, WorkerPool

MAX_MOVING = 4
_LOOK_DELAY_S = 0.02


class Moves:
    """Which requests are between two targets, and when to let the next ones leave.

    Args:
        pool: Of the workers.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._moving: set[str] = set()
        self._is_scheduled = False

    def look(self) -> None:
        """Let requests leave soon, if a worker drains; called with every message of a worker."""
        if not self._is_scheduled and self._drains():
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(_LOOK_DELAY_S, self._offer)

    def begin(self, need: Need) -> bool:
        """Return whether a request may leave its target now; it counts as on its way then."""
        if len(self._moving) >= MAX_MOVING or not self._pool.has_room(need):
            return False
        self._moving.add(need.request_id)
        return True

    def end(self, request_id: str) -> None:
        """Take note that a request is on a target again, or over; nothing if it was not moving."""
        if request_id in self._moving:
            self._moving.discard(request_id)
            self.look()

    def _offer(self) -> None:
        self._is_scheduled = False
        for worker in (*self._pool.targets, *self._pool.drafts):
            if worker.is_draining:
                worker.offer_moves()

    def _drains(self) -> bool:
        return any(
            worker.is_draining and worker.num_own_requests
            for worker in (*self._pool.targets, *self._pool.drafts)
        )
