"""AdminService: what operators ask of the orchestrator, and through it of its workers.

What concerns a worker is passed on to it, so that every orchestrator process hears of it the same
way: a worker that drains says so by its health. What concerns requests is asked of every process
that shares the port (`siblings.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from coppice.v1 import admin_pb2 as pb
from coppice.v1 import admin_pb2_grpc as pb_grpc
from coppice.v1 import control_pb2
from orchestrator.endpoints import WorkerEndpoints
from orchestrator.figures import Stage
from orchestrator.pairing import ModelIdentity
from orchestrator.pool import WorkerPool
from orchestrator.running import Running
from orchestrator.siblings import Siblings
from orchestrator.silence import silence_of
from orchestrator.worker_control import call_worker
from orchestrator.workers import WorkerSession
from shared.config import OrchestratorConfig
from shared.config.values import shown_values
from shared.errors import AbortedError, InvalidArgumentError, NotFoundError
from shared.logs import LEVELS, set_level
from shared.messages import WorkerInfo
from shared.messages.codec import to_proto
from shared.rpc.auth import caller_name
from shared.rpc.channel import channel_options

logger = logging.getLogger(__name__)

DEFAULT_PROFILE_STEPS = 20
_OTHERS_TIMEOUT_S = 5.0
# Marks a call of one process to another one, which must not ask further.
_LOCAL = ("coppice-scope", "process")
_CREDENTIALS = "authorization"

Context = grpc.aio.ServicerContext


class AdminService(pb_grpc.AdminServiceServicer):
    """The service of operators.

    Args:
        endpoints: Of all roles.
        siblings: Processes that share the port; None: there are none.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        pool: WorkerPool,
        endpoints: Sequence[WorkerEndpoints],
        running: Running,
        siblings: Siblings | None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._endpoints = tuple(endpoints)
        self._running = running
        self._siblings = siblings

    # --- workers ---------------------------------------------------------------------------------

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Context
    ) -> pb.ListWorkersResponse:
        """Return all workers, by role and address."""
        now_s = asyncio.get_running_loop().time()
        known = [self._status_of(worker, now_s) for worker in self._sessions]
        addresses = {status.address for status in known}
        missing = [
            pb.WorkerStatus(
                address=worker.address,
                role=endpoints.role_name,
                state=pb.WORKER_STATE_CONNECTING,
                problem=worker.problem,
                state_s=now_s - worker.since_s,
            )
            for endpoints in self._endpoints
            for worker in endpoints.unanswered
            if worker.address not in addresses
        ]
        by_role = sorted([*known, *missing], key=lambda s: (s.role != "target", s.address))
        return pb.ListWorkersResponse(workers=by_role)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Have a worker take no new requests."""
        order = control_pb2.SetDrainingRequest(is_draining=True)
        reply = await call_worker(self._session(request.worker), "SetDraining", order)
        return pb.DrainResponse(num_requests=reply.num_requests)

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.UndrainResponse:
        """Have a worker take new requests again."""
        order = control_pb2.SetDrainingRequest(is_draining=False)
        await call_worker(self._session(request.worker), "SetDraining", order)
        return pb.UndrainResponse()

    async def StartProfile(
        self, request: pb.StartProfileRequest, context: Context
    ) -> pb.StartProfileResponse:
        """Record a worker's next steps."""
        order = control_pb2.StartWorkerProfileRequest(
            num_steps=request.num_steps or DEFAULT_PROFILE_STEPS
        )
        reply = await call_worker(self._session(request.worker), "StartWorkerProfile", order)
        return pb.StartProfileResponse(path=reply.path)

    async def StopProfile(
        self, request: pb.StopProfileRequest, context: Context
    ) -> pb.StopProfileResponse:
        """End a recording; return its file."""
        order = control_pb2.StopWorkerProfileRequest()
        reply = await call_worker(self._session(request.worker), "StopWorkerProfile", order)
        return pb.StopProfileResponse(path=reply.path)

    # --- processes -------------------------------------------------------------------------------

    async def GetConfig(
        self, request: pb.GetConfigRequest, context: Context
    ) -> pb.GetConfigResponse:
        """Return the configuration of a worker or of this orchestrator."""
        if not request.worker:
            return pb.GetConfigResponse(values=shown_values(self._config))
        order = control_pb2.GetWorkerConfigRequest()
        reply = await call_worker(self._session(request.worker), "GetWorkerConfig", order)
        return pb.GetConfigResponse(values=reply.values)

    async def SetLogLevel(
        self, request: pb.SetLogLevelRequest, context: Context
    ) -> pb.SetLogLevelResponse:
        """Set the level of a logger in a worker, or in all processes of the orchestrator."""
        if request.level not in LEVELS:
            raise InvalidArgumentError(
                f"level is {request.level!r}, expected one of {', '.join(LEVELS)}", field="level"
            )
        if request.worker:
            order = control_pb2.SetWorkerLogLevelRequest(logger=request.logger, level=request.level)
            await call_worker(self._session(request.worker), "SetWorkerLogLevel", order)
        else:
            set_level(request.logger, request.level)
            await self._ask_others("SetLogLevel", request, context)
        return pb.SetLogLevelResponse()

    # --- requests --------------------------------------------------------------------------------

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End a request, whichever process serves it."""
        error = AbortedError("an operator has ended the request")
        if self._running.end(request.request_id, error):
            who = caller_name(context) or "an operator"
            logger.warning("request %s was ended by %s", request.request_id, who)
        elif not await self._ask_others("Abort", request, context):
            raise NotFoundError(f"no request {request.request_id!r} is running", field="request_id")
        return pb.AbortResponse()

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        """Return sums over all requests of all processes."""
        stats = self._stats()
        for other in await self._ask_others("Stats", request, context):
            _add(stats, other)
        return stats

    def _stats(self) -> pb.StatsResponse:
        """Return the sums of this process."""
        figures, stages = self._running.figures, self._running.num_by_stage
        return pb.StatsResponse(
            num_waiting=stages[Stage.WAITING],
            num_prefilling=stages[Stage.PREFILLING],
            num_decoding=stages[Stage.DECODING],
            num_ended=self._running.num_ended,
            num_output_tokens=figures.num_output_tokens,
            num_rounds=figures.num_rounds,
            num_rounds_by_source={
                "peer": figures.num_peer_rounds,
                "relayed": figures.num_relayed_rounds,
                "root_only": figures.num_root_only_rounds,
                "resting": figures.num_resting_rounds,
            },
            num_draft_tokens=figures.num_draft_tokens,
            num_accepted_drafts=figures.num_accepted_drafts,
            draft_wait_s=figures.draft_wait_s,
            verify_s=figures.verify_s,
            num_retries=figures.num_retries,
            num_processes=1,
        )

    def _status_of(self, worker: WorkerSession, now_s: float) -> pb.WorkerStatus:
        """Return what is known of a worker.

        Args:
            now_s: Loop time.
        """
        misfit = self._pool.pairs.unpaired.get(worker.address, "")
        silence = silence_of(worker, self._config, now_s=now_s)
        state = pb.WORKER_STATE_READY
        if worker.problem:
            state = pb.WORKER_STATE_REFUSED
        elif misfit:
            state = pb.WORKER_STATE_UNPAIRED
        elif not worker.is_available:
            state = pb.WORKER_STATE_DRAINING
        elif silence is not None:
            state = pb.WORKER_STATE_SILENT
        is_target = worker.role == "target"
        return pb.WorkerStatus(
            address=worker.address,
            role=worker.role,
            state=state,
            problem=worker.problem or misfit or (silence.problem if silence else ""),
            state_s=silence.for_s if silence and state == pb.WORKER_STATE_SILENT else 0.0,
            fingerprint=ModelIdentity.of(worker.info).fingerprint if is_target else "",
            num_running=worker.load.num_running,
            num_waiting=worker.load.num_waiting,
            info=to_proto(shown_info(worker)),
        )

    @property
    def _sessions(self) -> tuple[WorkerSession, ...]:
        return (*self._pool.targets, *self._pool.drafts, *self._pool.refused)

    def _session(self, address: str) -> WorkerSession:
        """Return the session with a worker.

        Raises: NotFoundError if there is none.
        """
        for worker in self._sessions:
            if worker.address == address:
                return worker
        known = ", ".join(sorted(worker.address for worker in self._sessions)) or "none"
        raise NotFoundError(
            f"no worker answers at {address!r}; those that do: {known}",
            reason="WORKER_NOT_FOUND",
            field="worker",
        )

    async def _ask_others(self, method: str, request: Any, context: Context) -> list[Any]:
        """Call the same method of every other process; return the replies of those that serve.

        A process that is being started again knows of no request, and is left out.
        """
        said = dict(context.invocation_metadata() or ())
        if self._siblings is None or _LOCAL[0] in said:
            return []
        metadata = [_LOCAL, *((key, said[key]) for key in (_CREDENTIALS,) if key in said)]
        replies = await asyncio.gather(
            *(
                _ask(address, method, request, metadata)
                for address in self._siblings.other_addresses
            )
        )
        return [reply for reply in replies if reply is not None]


async def _ask(address: str, method: str, request: Any, metadata: Any) -> Any:
    """Call a process of this machine; None if it does not answer, or has nothing to say."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        try:
            call = getattr(pb_grpc.AdminServiceStub(channel), method)
            return await call(request, metadata=metadata, timeout=_OTHERS_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                logger.warning("%s was not answered by %s: %s", method, address, error.details())
            return None


def _add(stats: pb.StatsResponse, other: pb.StatsResponse) -> None:
    """Add the sums of another process."""
    for spec in stats.DESCRIPTOR.fields:
        mine, theirs = getattr(stats, spec.name), getattr(other, spec.name)
        if spec.message_type is None:
            setattr(stats, spec.name, mine + theirs)
        else:
            mine.update(Counter(mine) + Counter(theirs))


def shown_info(worker: WorkerSession) -> WorkerInfo:
    """Return what operators see of a worker: not by which names drafts reach a target."""
    return replace(worker.info, load=worker.load, peer_address="", peer_socket="", feature_ring="")
