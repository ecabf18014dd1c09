"""A worker's identity: unknown until its engine is ready, then fixed but for the load."""

from __future__ import annotations

from dataclasses import replace

from shared.errors import UnavailableError
from shared.messages import WorkerInfo, WorkerLoad


class WorkerIdentity:
    """What GetInfo answers."""

    def __init__(self) -> None:
        self._info: WorkerInfo | None = None
        self.load = WorkerLoad()

    def set(self, info: WorkerInfo) -> None:
        """Make the worker known: its engine is ready."""
        self._info = info
        self.load = info.load

    def require_ready(self) -> WorkerInfo:
        """Return the info as the engine gave it.

        Raises: UnavailableError while the model loads.
        """
        if self._info is None:
            raise UnavailableError("the model is still loading; try again", reason="LOADING")
        return self._info

    def current(self) -> WorkerInfo:
        """Return the info with the newest load.

        Raises: UnavailableError while the model loads.
        """
        return replace(self.require_ready(), load=self.load)
