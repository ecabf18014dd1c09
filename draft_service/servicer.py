"""DraftService: sessions of orchestrators, identity; feature commands go to the targets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio

from coppice.v1 import draft_pb2, draft_pb2_grpc
from draft_service.allowed_targets import AllowedTargets
from draft_service.feature_client import FeatureClient
from shared.access.caller import Caller
from shared.messages import (
    DraftClose,
    DraftOpen,
    FeatureCommand,
    RequestFailure,
    RequestRetracted,
    WorkerInfo,
    to_proto,
)
from shared.messages.batches import Batch, pack_draft_response, unpack_draft_request
from shared.rpc.engine import EngineReport
from shared.rpc.identity import WorkerIdentity
from shared.rpc.protocol import check_caller
from shared.rpc.sessions import SessionHub, SessionProtocol

PROTOCOL = SessionProtocol(
    open_type=DraftOpen,
    close_type=DraftClose,
    make_close=lambda request_id, epoch: DraftClose(request_id=request_id, draft_epoch=epoch),
    epoch_of=lambda message: message.draft_epoch,
    unpack=unpack_draft_request,
    pack=pack_draft_response,
    is_final=lambda answer: isinstance(answer, RequestFailure | RequestRetracted),
)


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """The gRPC face of a draft engine.

    Args:
        send: Queues messages for the engine.
        caller: What targets are shown.
        targets: Those that requests may name.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        send: Callable[[Sequence[Any]], None],
        *,
        caller: Caller,
        targets: AllowedTargets,
    ) -> None:
        self._targets = targets
        self.sessions = SessionHub(replace(PROTOCOL, unpack=self._unpack), send)
        self.features = FeatureClient(send, caller=caller)
        self._identity = identity

    def set_info(self, info: WorkerInfo) -> None:
        """Take note of what the engine is."""
        self._targets.start()
        self._identity.set(info)

    def deliver(self, report: EngineReport) -> None:
        """Route what the engine answered."""
        answers = []
        for output in report.outputs:
            if isinstance(output, FeatureCommand):
                self.features.handle(output)
            else:
                answers.append(output)
        self.sessions.deliver(answers, report.load)

    async def close(self) -> None:
        """End the streams to the targets."""
        await self._targets.close()
        await self.features.close()

    def clean_up(self) -> None:
        """Do nothing: a draft's engine leaves nothing."""

    def _unpack(self, request: draft_pb2.DraftServiceSessionRequest) -> Batch[Any]:
        return self._targets.filter(unpack_draft_request(request))

    async def Session(
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftServiceSessionRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Serve one orchestrator until it closes the stream."""
        check_caller(context.invocation_metadata())
        self._identity.require_ready()
        await self.sessions.serve(request_iterator, context)

    async def GetInfo(
        self, request: draft_pb2.DraftServiceGetInfoRequest, context: grpc.aio.ServicerContext
    ) -> draft_pb2.DraftServiceGetInfoResponse:
        """Return identity, limits and load."""
        return draft_pb2.DraftServiceGetInfoResponse(info=to_proto(self._identity.current()))
