"""WorkerControlService: what an operator asks of a worker, by way of the orchestrator."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio

from coppice.v1 import control_pb2 as pb
from coppice.v1 import control_pb2_grpc as pb_grpc
from shared.config import WorkerConfig
from shared.config.values import shown_values
from shared.errors import (
    InvalidArgumentError,
    NotFoundError,
    StaleStateError,
    UnavailableError,
)
from shared.logs import LEVELS, set_level
from shared.rpc.engine import ProfileWritten, RecordProfile, SetEngineLogLevel

if TYPE_CHECKING:
    from shared.rpc.worker import WorkerServer

MAX_PROFILE_STEPS = 200
"""More would not fit into memory, nor be looked at."""
_WRITE_TIMEOUT_S = 120.0

Context = grpc.aio.ServicerContext


class WorkerControl(pb_grpc.WorkerControlServiceServicer):
    """Drains a worker, sets its log levels, says its configuration, records profiles.

    Args:
        role: "target" or "draft"; names the files of profiles.
    """

    def __init__(self, worker: WorkerServer, *, role: str, config: WorkerConfig) -> None:
        self._worker = worker
        self._role = role
        self._config = config
        self._serial = itertools.count()
        self._profile: asyncio.Future[ProfileWritten] | None = None
        pb_grpc.add_WorkerControlServiceServicer_to_server(self, worker.server.grpc_server)

    def note_profile(self, written: ProfileWritten) -> None:
        """Take note that the engine has ended a recording."""
        if self._profile is not None and not self._profile.done():
            self._profile.set_result(written)

    async def SetDraining(
        self, request: pb.SetDrainingRequest, context: Context
    ) -> pb.SetDrainingResponse:
        """Take no new requests, or take them again."""
        await self._worker.set_draining(is_draining=request.is_draining)
        return pb.SetDrainingResponse(num_requests=self._worker.num_requests)

    async def SetWorkerLogLevel(
        self, request: pb.SetWorkerLogLevelRequest, context: Context
    ) -> pb.SetWorkerLogLevelResponse:
        """Set the level of a logger, in the front and in the engine."""
        check_level(request.level)
        self._worker.order(SetEngineLogLevel(logger=request.logger, level=request.level))
        set_level(request.logger, request.level)
        return pb.SetWorkerLogLevelResponse()

    async def GetWorkerConfig(
        self, request: pb.GetWorkerConfigRequest, context: Context
    ) -> pb.GetWorkerConfigResponse:
        """Return the configuration, without secrets."""
        return pb.GetWorkerConfigResponse(values=shown_values(self._config))

    async def StartWorkerProfile(
        self, request: pb.StartWorkerProfileRequest, context: Context
    ) -> pb.StartWorkerProfileResponse:
        """Record the engine's next steps into a file."""
        if not 1 <= request.num_steps <= MAX_PROFILE_STEPS:
            raise InvalidArgumentError(
                f"num_steps is {request.num_steps}, expected 1 to {MAX_PROFILE_STEPS}",
                field="num_steps",
            )
        if self._profile is not None and not self._profile.done():
            raise StaleStateError(
                "a profile is being recorded; stop it first, or wait for its steps",
                reason="PROFILE_UNDER_WAY",
            )
        folder = self._config.profile_dir or Path(tempfile.gettempdir()) / "coppice-profiles"
        incarnation = self._worker.identity.require_ready().incarnation
        path = str(Path(folder) / f"{self._role}-{incarnation}-{next(self._serial)}.json.gz")
        self._worker.order(RecordProfile(path=path, num_steps=request.num_steps))
        self._profile = asyncio.get_running_loop().create_future()
        return pb.StartWorkerProfileResponse(path=path)

    async def StopWorkerProfile(
        self, request: pb.StopWorkerProfileRequest, context: Context
    ) -> pb.StopWorkerProfileResponse:
        """End a recording, if one is under way; return the file of the newest one."""
        if self._profile is None:
            raise NotFoundError("no profile was started on this worker", reason="NO_PROFILE")
        if not self._profile.done():
            self._worker.order(RecordProfile())
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                written = await asyncio.shield(self._profile)
        except TimeoutError:
            written = ProfileWritten(path="", problem="the engine does not write it; ask later")
        if written.problem:
            raise UnavailableError(
                f"there is no profile: {written.problem}", reason="PROFILE_FAILED"
            )
        return pb.StopWorkerProfileResponse(path=written.path)


def check_level(level: str) -> None:
    """Raise InvalidArgumentError unless logs have this level."""
    if level not in LEVELS:
        raise InvalidArgumentError(
            f"level is {level!r}, expected one of {', '.join(LEVELS)}", field="level"
        )
