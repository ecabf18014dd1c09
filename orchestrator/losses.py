"""What a request may lose and be rebuilt from its tokens, and when that is enough."""

from __future__ import annotations

import enum

from shared.errors import InternalError, UnavailableError

MAX_KILLS = 2
"""Workers that may go down with a request in their hands before it is refused."""
MAX_FRUITLESS_REBUILDS = 8


class Loss(enum.Enum):
    """Why a request must be rebuilt."""

    LOST = "the worker is gone"
    MOVED = "the worker is draining"
    SILENT = "the worker is silent"
    FAILED = "the worker failed"
    FORGOTTEN = "the worker does not hold this state"
    RETRACTED = "the worker needed the room"
    NO_ROOM = "the worker has no room"


class TargetGone(Exception):
    """The state on the target is lost; the request is rebuilt from its tokens.

    Args:
        is_kill: The worker went down, or went wrong, with this request in its hands.
    """

    def __init__(self, loss: Loss, *, is_kill: bool = False, detail: str = "") -> None:
        super().__init__(f"{loss.value}{': ' + detail if detail else ''}")
        self.loss = loss
        self.is_kill = is_kill


class Losses:
    """Counts the targets that one request has lost."""

    def __init__(self) -> None:
        self.num_rebuilds = 0
        self.avoid: frozenset[str] = frozenset()
        """Address of the target that failed last, used only if there is no other one."""
        self._last: Loss | None = None
        self._num_kills = 0
        self._num_fruitless = 0  # since the last token

    @property
    def wants_room(self) -> bool:
        """Return whether the next target must have pages for the request beforehand."""
        return self._last in (Loss.RETRACTED, Loss.NO_ROOM)

    def note_progress(self) -> None:
        """Take note that tokens were committed."""
        self._num_fruitless = 0

    def add(self, gone: TargetGone, address: str | None) -> None:
        """Account for lost state.

        Args:
            address: Of the target; None: there was none yet.
        Raises: InternalError if the request has brought down too many workers, UnavailableError if
            rebuilding it leads nowhere.
        """
        self.num_rebuilds += 1
        self._last = gone.loss
        self._num_kills += gone.is_kill
        self._num_fruitless += gone.loss not in (Loss.RETRACTED, Loss.NO_ROOM)
        if address is not None and gone.loss is not Loss.RETRACTED:
            self.avoid = frozenset({address})
        if self._num_kills >= MAX_KILLS:
            raise InternalError(
                f"{self._num_kills} workers failed while they ran this request; it is not tried "
                "again. The workers' logs say why",
                reason="REQUEST_KILLED_WORKERS",
            ) from gone
        if self._num_fruitless > MAX_FRUITLESS_REBUILDS:
            raise UnavailableError(
                f"the request was rebuilt {self._num_fruitless} times without a token: {gone}",
                reason="NO_PROGRESS",
            ) from gone
