"""A worker's identity: unknown until its engine is ready, then fixed but for the load."""

from __future__ import annotations

from dataclasses import replace

from shared.errors import UnavailableError
from shared.messages import WorkerInfo, WorkerLoad
from shared.metrics.samples import Samples
from shared.metrics.worker import info_samples, load_samples
from shared.rpc.protocol import PROTOCOL_VERSION


class WorkerIdentity:
    """What GetInfo answers.

    `load` and `counts` are as the engine has last reported them.
    """

    def __init__(self) -> None:
        self._info: WorkerInfo | None = None
        self.load = WorkerLoad()
        self.counts: Samples = {}

    def set(self, info: WorkerInfo) -> None:
        """Make the worker known: its engine is ready."""
        version = info.protocol_version or PROTOCOL_VERSION
        self._info = replace(info, protocol_version=version)
        self.load = info.load

    def forget(self) -> None:
        """Make the worker unknown again: its engine has ended."""
        self._info = None

    @property
    def samples(self) -> Samples:
        """Return the named values of this moment; none while the model loads."""
        if self._info is None:
            return {}
        return {**info_samples(self._info), **load_samples(self.current().load)}

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
        load = replace(self.load, counts=tuple(sorted(self.counts.items())))
        return replace(self.require_ready(), load=load)
