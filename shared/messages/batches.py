"""Session messages: batches of values in, one protobuf message out, and back.

Order inside a batch is kept per kind only; across kinds it is the order of the message's fields:
what opens a request comes before what uses it, a close comes last. Epochs make that safe: a close
of an older epoch than the newest open is stale. One malformed entry never spoils its batch: it
becomes a RequestFailure in `Batch.rejected`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from coppice.v1 import draft_pb2, peer_pb2, target_pb2, tree_pb2
from shared.errors import InvalidArgumentError
from shared.messages import types
from shared.messages.convert import from_proto, to_proto
from shared.messages.convert_tree import load_from_proto, load_to_proto
from shared.rpc.status import failure_of

TargetRequest = types.TargetOpen | types.VerifyRound | types.CreditUpdate | types.TargetClose
TargetReply = (
    types.TargetAdmitted
    | types.AcceptedPath
    | types.RequestFailure
    | types.RequestRetracted
    | types.DraftDetached
)
DraftRequest = types.DraftOpen | types.DraftRound | types.DraftClose
DraftReply = types.TokenTree | types.RequestFailure | types.RequestRetracted
FeatureRequest = types.FeatureSubscribe | types.FeatureAck | types.FeatureUnsubscribe
FeatureReply = types.FeatureChunk | types.RequestFailure
ToTarget = (
    types.PeerAttach
    | types.FeatureSubscribe
    | types.FeatureAck
    | types.TreeBatch
    | types.PeerDetach
)
ToDraft = types.FeatureChunk | types.RequestFailure | types.DraftRound | types.PathBatch

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Generic[Item]):
    """What one session message held.

    Args:
        rejected: One failure per entry that could not be read.
        load: The sender's load, in replies that carry it.
    """

    messages: list[Item]
    rejected: list[types.RequestFailure] = field(default_factory=list)
    load: types.WorkerLoad | None = None


def pack_target_request(
    messages: Iterable[TargetRequest],
) -> target_pb2.TargetServiceSessionRequest:
    """Pack what an orchestrator tells a target."""
    batch = target_pb2.TargetServiceSessionRequest()
    fields = {
        types.TargetOpen: batch.opens,
        types.VerifyRound: batch.verifies,
        types.CreditUpdate: batch.credits,
        types.TargetClose: batch.closes,
    }
    _pack(messages, fields)
    return batch


def unpack_target_request(
    batch: target_pb2.TargetServiceSessionRequest,
) -> Batch[TargetRequest]:
    """Unpack what an orchestrator told a target: opens, verifies, credits, closes."""
    return _unpack(batch.opens, batch.verifies, batch.credits, batch.closes)


def pack_target_response(
    messages: Iterable[TargetReply], load: types.WorkerLoad
) -> target_pb2.TargetServiceSessionResponse:
    """Pack what a target answers."""
    batch = target_pb2.TargetServiceSessionResponse(load=_brief(load))
    fields = {
        types.TargetAdmitted: batch.admitted,
        types.AcceptedPath: batch.accepted_paths,
        types.RequestFailure: batch.failures,
        types.RequestRetracted: batch.retracted,
        types.DraftDetached: batch.detached,
    }
    _pack(messages, fields)
    return batch


def unpack_target_response(
    batch: target_pb2.TargetServiceSessionResponse,
) -> Batch[TargetReply]:
    """Unpack what a target answered: admissions, paths, failures, retractions, lost channels."""
    return _unpack(
        batch.admitted,
        batch.accepted_paths,
        batch.failures,
        batch.retracted,
        batch.detached,
        load=load_from_proto(batch.load),
    )


def pack_draft_request(messages: Iterable[DraftRequest]) -> draft_pb2.DraftServiceSessionRequest:
    """Pack what an orchestrator tells a draft."""
    batch = draft_pb2.DraftServiceSessionRequest()
    fields = {
        types.DraftOpen: batch.opens,
        types.DraftRound: batch.rounds,
        types.DraftClose: batch.closes,
    }
    _pack(messages, fields)
    return batch


def unpack_draft_request(batch: draft_pb2.DraftServiceSessionRequest) -> Batch[DraftRequest]:
    """Unpack what an orchestrator told a draft: opens, rounds, closes."""
    return _unpack(batch.opens, batch.rounds, batch.closes)


def pack_draft_response(
    messages: Iterable[DraftReply], load: types.WorkerLoad
) -> draft_pb2.DraftServiceSessionResponse:
    """Pack what a draft answers."""
    batch = draft_pb2.DraftServiceSessionResponse(load=_brief(load))
    fields = {
        types.TokenTree: batch.trees,
        types.RequestFailure: batch.failures,
        types.RequestRetracted: batch.retracted,
    }
    _pack(messages, fields)
    return batch


def unpack_draft_response(batch: draft_pb2.DraftServiceSessionResponse) -> Batch[DraftReply]:
    """Unpack what a draft answered: trees, failures, retractions."""
    return _unpack(batch.trees, batch.failures, batch.retracted, load=load_from_proto(batch.load))


def pack_feature_requests(
    commands: Iterable[FeatureRequest],
) -> list[target_pb2.StreamFeaturesRequest]:
    """Pack what a draft tells a target: a message per command, one for all acknowledgements."""
    acks = target_pb2.StreamFeaturesRequest()
    messages = []
    for command in commands:
        match command:
            case types.FeatureAck():
                acks.acks.append(to_proto(command))
            case types.FeatureSubscribe():
                messages.append(target_pb2.StreamFeaturesRequest(subscribe=to_proto(command)))
            case types.FeatureUnsubscribe():
                messages.append(target_pb2.StreamFeaturesRequest(unsubscribe=to_proto(command)))
    return [acks, *messages] if acks.acks else messages


def unpack_feature_request(message: target_pb2.StreamFeaturesRequest) -> Batch[FeatureRequest]:
    """Unpack what a draft told a target; a message with nothing in it is rejected."""
    name = message.WhichOneof("command")
    if name is None and not message.acks:
        error = InvalidArgumentError("command is absent or unknown", field="command")
        return Batch(messages=[], rejected=[failure_of(error)])
    return _unpack([getattr(message, name)] if name else [], message.acks)


def pack_feature_response(
    messages: Iterable[FeatureReply], *, feature_ring: str = ""
) -> target_pb2.StreamFeaturesResponse:
    """Pack chunks and failures of a feature stream.

    Args:
        feature_ring: In the first response: the target's ring.
    """
    batch = target_pb2.StreamFeaturesResponse(feature_ring=feature_ring)
    _pack(messages, {types.FeatureChunk: batch.chunks, types.RequestFailure: batch.failures})
    return batch


def unpack_feature_response(batch: target_pb2.StreamFeaturesResponse) -> Batch[FeatureReply]:
    """Unpack chunks and failures of a feature stream."""
    return _unpack(batch.chunks, batch.failures)


def pack_to_target(messages: Iterable[ToTarget]) -> peer_pb2.PeerToTarget:
    """Pack what a draft's engine tells a target's."""
    batch = peer_pb2.PeerToTarget()
    fields = {
        types.PeerAttach: batch.opens,
        types.FeatureSubscribe: batch.subscribes,
        types.FeatureAck: batch.acks,
        types.TreeBatch: batch.trees,
        types.PeerDetach: batch.closes,
    }
    _pack(messages, fields)
    return batch


def unpack_to_target(batch: peer_pb2.PeerToTarget) -> Batch[ToTarget]:
    """Unpack what a draft's engine told a target's."""
    return _unpack(batch.opens, batch.subscribes, batch.acks, batch.trees, batch.closes)


def pack_to_draft(messages: Iterable[ToDraft]) -> peer_pb2.PeerToDraft:
    """Pack what a target's engine tells a draft's."""
    batch = peer_pb2.PeerToDraft()
    fields = {
        types.FeatureChunk: batch.chunks,
        types.RequestFailure: batch.failures,
        types.DraftRound: batch.rounds,
        types.PathBatch: batch.path_batches,
    }
    _pack(messages, fields)
    return batch


def unpack_to_draft(batch: peer_pb2.PeerToDraft) -> Batch[ToDraft]:
    """Unpack what a target's engine told a draft's: rows before orders."""
    return _unpack(batch.chunks, batch.failures, batch.rounds, batch.path_batches)


def _brief(load: types.WorkerLoad) -> tree_pb2.WorkerLoad:
    """Return the load without its counts per kernel, which only GetInfo gives."""
    return load_to_proto(replace(load, kernel_launches=()) if load.kernel_launches else load)


def _pack(messages: Iterable[Any], fields: dict[Any, Any]) -> None:
    for message in messages:
        fields[type(message)].append(to_proto(message))


def _unpack(*kinds: Iterable[Any], load: types.WorkerLoad | None = None) -> Batch[Any]:
    messages: list[Any] = []
    rejected: list[types.RequestFailure] = []
    for entries in kinds:
        for entry in entries:
            try:
                messages.append(from_proto(entry))
            except InvalidArgumentError as error:
                rejected.append(
                    failure_of(
                        error,
                        request_id=getattr(entry, "request_id", ""),
                        target_epoch=getattr(entry, "target_epoch", 0),
                        draft_epoch=getattr(entry, "draft_epoch", 0),
                        round_idx=getattr(entry, "round_idx", 0),
                    )
                )
    return Batch(messages=messages, rejected=rejected, load=load)
