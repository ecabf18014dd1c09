"""What a request may lose and be rebuilt from its tokens, and when that is enough."""

from __future__ import annotations

import asyncio
import enum

from orchestrator.suspicion import Suspicion
from orchestrator.workers import WorkerSession
from shared.errors import InternalError, UnavailableError

MAX_FRUITLESS_REBUILDS = 8
_LOOK_S = 0.1


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
    """Counts the targets that one request has lost.

    Args:
        request_id: As the workers know it.
    """

    def __init__(self, request_id: str) -> None:
        self.num_rebuilds = 0
        self.avoid: frozenset[str] = frozenset()
        """Address of the target that failed last, used only if there is no other one."""
        self._last: Loss | None = None
        self._suspicion = Suspicion(request_id)
        self._num_fruitless = 0  # since the last token

    @property
    def wants_room(self) -> bool:
        """Return whether the next target must have pages for the request beforehand."""
        return self._last in (Loss.RETRACTED, Loss.NO_ROOM, Loss.MOVED)

    @property
    def needs_trial(self) -> bool:
        """Return whether workers went down with the request, and it may be why."""
        return self._suspicion.needs_trial

    def note_progress(self, worker: WorkerSession, round_idx: int) -> None:
        """Take note that a worker has committed tokens in a round."""
        self._num_fruitless = 0
        if round_idx > 0:
            self._suspicion.acquit(worker)

    def leave(self, worker: WorkerSession) -> None:
        """Take note that nothing of the request is left on a worker."""
        self._suspicion.leave(worker)

    def judge(self) -> None:
        """Look at what is known by now of the workers that were lost.

        Raises: InternalError if the request has brought down too many.
        """
        if self._suspicion.is_guilty(_now_s()):
            raise InternalError(
                f"{self._suspicion.num_kills} times a worker failed while it ran this request, and "
                "no other request explains it; it is not tried again. The workers' logs say why",
                reason="REQUEST_KILLED_WORKERS",
            )

    async def wait_judgment(self) -> None:
        """Wait until enough is known of the workers that were lost to risk another one.

        Raises: As of judge.
        """
        while self._suspicion.is_undecided(_now_s()):
            await asyncio.sleep(_LOOK_S)
        self.judge()

    def add(self, gone: TargetGone, worker: WorkerSession | None) -> None:
        """Account for lost state.

        Args:
            worker: Where it was; None: no target was chosen yet.
        Raises: InternalError if the request has brought down too many workers, UnavailableError if
            rebuilding it leads nowhere.
        """
        self.num_rebuilds += 1
        self._last = gone.loss
        self._num_fruitless += gone.loss not in (Loss.RETRACTED, Loss.NO_ROOM)
        if worker is not None and gone.loss is not Loss.RETRACTED:
            self.avoid = frozenset({worker.address})
        if worker is not None and gone.is_kill:
            if gone.loss is Loss.FAILED:
                self._suspicion.note_failure(worker)
            else:
                self._suspicion.note_death(worker, _now_s(), is_broken=gone.loss is Loss.LOST)
        self.judge()
        if self._num_fruitless > MAX_FRUITLESS_REBUILDS:
            raise UnavailableError(
                f"the request was rebuilt {self._num_fruitless} times without a token: {gone}",
                reason="NO_PROGRESS",
            ) from gone


def _now_s() -> float:
    return asyncio.get_running_loop().time()
