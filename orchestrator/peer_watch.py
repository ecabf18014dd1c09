"""Rounds that target and draft run by themselves: whether to let them, and when they cease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class PeerTrust:
    """Whether one draft_epoch may run peer rounds.

    Not after the target lost its channel to the draft, nor when trees that the target waited for
    did not come again and again.

    Args:
        is_detached: As after `detach`.
    """

    _MAX_MISSES = 3
    _FORGIVEN_AFTER_ROUNDS = 64

    def __init__(self, *, is_detached: bool = False) -> None:
        self._is_detached = is_detached
        self._num_misses = 0
        self._num_rounds = 0

    @property
    def allows_peer_rounds(self) -> bool:
        """Return whether credit for peer rounds may be given."""
        return not self._is_detached and self._num_misses < self._MAX_MISSES

    def detach(self) -> None:
        """Take note that the channel is lost, for good."""
        self._is_detached = True

    def miss(self) -> None:
        """Count a tree that did not come in time."""
        self._num_misses += 1

    def excuse(self) -> None:
        """Take back the last miss."""
        self._num_misses = max(self._num_misses - 1, 0)

    def note_round(self) -> None:
        """Count a peer round; many of them make up for all misses."""
        self._num_rounds += 1
        if self._num_rounds % self._FORGIVEN_AFTER_ROUNDS == 0:
            self._num_misses = 0


class PeerWatch:
    """Notices when peer rounds cease. One timer serves many rounds."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._round_began = 0.0  # loop time
        self._timer: asyncio.TimerHandle | None = None  # it alone holds the callbacks of `start`

    @property
    def is_running(self) -> bool:
        """Return whether rounds are watched."""
        return self._timer is not None

    def start(self, patience_s: Callable[[], float], on_overdue: Callable[[], None]) -> None:
        """Begin to watch, unless rounds are watched already: the first one begins now.

        Args:
            patience_s: Returns how long a round may take, seconds.
            on_overdue: Called once when a round has taken longer.
        """
        if self._timer is None:
            self._round_began = self._loop.time()
            self._look(patience_s, on_overdue)

    def next_round(self) -> float:
        """Take note that a round is done and the next one begins; return what it took, seconds."""
        now = self._loop.time()
        took_s, self._round_began = now - self._round_began, now
        return took_s

    def stop(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, patience_s: Callable[[], float], on_overdue: Callable[[], None]) -> None:
        deadline = self._round_began + patience_s()
        if deadline > self._loop.time():
            self._timer = self._loop.call_at(deadline, self._look, patience_s, on_overdue)
        else:
            self._timer = None
            on_overdue()
