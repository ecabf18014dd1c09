"""TargetService: sessions of orchestrators, feature streams of drafts, identity."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio

from coppice.v1 import target_pb2, target_pb2_grpc
from shared.errors import StatusCode
from shared.messages import (
    AcceptedPath,
    FeatureChunk,
    FeatureFailure,
    FinishReason,
    RequestFailure,
    RequestRetracted,
    TargetClose,
    TargetOpen,
    WorkerInfo,
    to_proto,
)
from shared.messages.batches import pack_target_response, unpack_target_request
from shared.peer.channel import remove_stale_sockets
from shared.peer.shared_files import MAILBOXES, RINGS
from shared.rpc.engine import EngineReport
from shared.rpc.identity import WorkerIdentity
from shared.rpc.protocol import check_caller
from shared.rpc.sessions import SessionHub, SessionProtocol
from target_service.feature_streams import FeatureHub


def _is_final(answer: Any) -> bool:
    match answer:
        case AcceptedPath():
            return answer.finish_reason is not FinishReason.NONE
        case RequestFailure():  # of an open (round 0), or of a request that the engine lost
            return answer.round_idx == 0 or answer.code == StatusCode.NOT_FOUND
    return isinstance(answer, RequestRetracted)


PROTOCOL = SessionProtocol(
    open_type=TargetOpen,
    close_type=TargetClose,
    make_close=lambda request_id, epoch: TargetClose(request_id=request_id, target_epoch=epoch),
    epoch_of=lambda message: message.target_epoch,
    unpack=unpack_target_request,
    pack=pack_target_response,
    is_final=_is_final,
)


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """The gRPC face of a target engine.

    Args:
        send: Queues messages for the engine.
    """

    def __init__(self, identity: WorkerIdentity, send: Callable[[Sequence[Any]], None]) -> None:
        self.sessions = SessionHub(PROTOCOL, send)
        self.features = FeatureHub(send)
        self._identity = identity

    def set_info(self, info: WorkerInfo) -> None:
        """Take note of what the engine is."""
        self._identity.set(info)
        self.features.ring_name = info.feature_ring

    def deliver(self, report: EngineReport) -> None:
        """Route what the engine answered: answers first, they have a longer way to the draft."""
        feature_types = (FeatureChunk, FeatureFailure)
        answers = [o for o in report.outputs if not isinstance(o, feature_types)]
        self.sessions.deliver(answers, report.load)
        self.features.deliver([o for o in report.outputs if isinstance(o, feature_types)])

    async def close(self) -> None:
        """Do nothing: streams end with the server."""

    def clean_up(self) -> None:
        """Remove rings, sockets and mailboxes of engines that were killed.

        One that was killed while it was loading has not said their names.
        """
        RINGS.remove_stale()
        remove_stale_sockets()
        MAILBOXES.remove_stale()

    async def Session(
        self,
        request_iterator: AsyncIterator[target_pb2.TargetServiceSessionRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Serve one orchestrator until it closes the stream."""
        check_caller(context.invocation_metadata())
        self._identity.require_ready()
        await self.sessions.serve(request_iterator, context)

    async def StreamFeatures(
        self,
        request_iterator: AsyncIterator[target_pb2.StreamFeaturesRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Serve one draft worker until it closes the stream."""
        check_caller(context.invocation_metadata())
        self._identity.require_ready()
        await self.features.serve(request_iterator, context)

    async def GetInfo(
        self,
        request: target_pb2.TargetServiceGetInfoRequest,
        context: grpc.aio.ServicerContext,
    ) -> target_pb2.TargetServiceGetInfoResponse:
        """Return identity, limits and load."""
        return target_pb2.TargetServiceGetInfoResponse(info=to_proto(self._identity.current()))
