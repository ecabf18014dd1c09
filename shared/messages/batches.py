"""Session messages: batches of values in, one protobuf message out, and back.

Order inside a batch is kept per kind only; across kinds it is the order of the message's fields:
what opens a request comes before what uses it, a close comes last. Epochs make that safe: a close
of an older epoch than the newest open is stale. One malformed entry never spoils its batch: it
becomes a RequestFailure in `Batch.rejected`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast

from coppice.v1 import draft_pb2, generation_pb2, peer_pb2, target_pb2
from shared.errors import InvalidArgumentError
from shared.messages import (
    AcceptedPath,
    CreditUpdate,
    DraftClose,
    DraftDetached,
    DraftOpen,
    DraftRest,
    DraftRound,
    FeatureAck,
    FeatureChunk,
    FeatureSubscribe,
    FeatureUnsubscribe,
    FinishInfo,
    GenerateEvent,
    PathBatch,
    PeerAttach,
    PeerDetach,
    PromptInfo,
    RequestFailure,
    RequestRetracted,
    RowsAnswer,
    RowsOffer,
    TargetAdmitted,
    TargetClose,
    TargetOpen,
    TokenDelta,
    TokenTree,
    TreeBatch,
    VerifyRound,
    WorkerLoad,
    from_proto,
    to_proto,
)
from shared.messages.codec import arguments_of
from shared.messages.deltas import split_delta, write_deltas
from shared.messages.fields import Within
from shared.messages.paths import is_plain, paths_arguments, paths_from_proto
from shared.rpc.status import failure_of

TargetCommand = TargetOpen | VerifyRound | CreditUpdate | TargetClose
TargetReply = (
    AcceptedPath | TargetAdmitted | RequestFailure | RequestRetracted | DraftDetached | DraftRest
)
DraftCommand = DraftOpen | DraftRound | DraftClose
DraftReply = TokenTree | RequestFailure | RequestRetracted
SubscriptionCommand = FeatureSubscribe | FeatureAck | FeatureUnsubscribe
FeatureReply = FeatureChunk | RequestFailure
ToTarget = RowsOffer | PeerAttach | FeatureSubscribe | FeatureAck | TreeBatch | PeerDetach
ToDraft = RowsAnswer | FeatureChunk | RequestFailure | DraftRound | PathBatch

# Of each session message: its fields in the order in which they are worked off, and what they hold.
_TARGET_COMMANDS = {
    "opens": TargetOpen,
    "verifies": VerifyRound,
    "credits": CreditUpdate,
    "closes": TargetClose,
}
_TARGET_REPLIES = {
    "admitted": TargetAdmitted,
    "rests": DraftRest,
    "accepted_paths": AcceptedPath,
    "failures": RequestFailure,
    "retracted": RequestRetracted,
    "detached": DraftDetached,
}
_BEFORE_PATHS = {name: _TARGET_REPLIES[name] for name in ("admitted", "rests")}
_AFTER_PATHS = {name: kind for name, kind in _TARGET_REPLIES.items() if name not in _BEFORE_PATHS}
_DRAFT_COMMANDS = {"opens": DraftOpen, "rounds": DraftRound, "closes": DraftClose}
_DRAFT_REPLIES = {"trees": TokenTree, "failures": RequestFailure, "retracted": RequestRetracted}
_FEATURE_REPLIES = {"chunks": FeatureChunk, "failures": RequestFailure}
_TO_TARGET = {
    "rows_offers": RowsOffer,
    "attaches": PeerAttach,
    "subscribes": FeatureSubscribe,
    "acks": FeatureAck,
    "trees": TreeBatch,
    "detaches": PeerDetach,
}
_TO_DRAFT = {
    "rows_answers": RowsAnswer,
    "chunks": FeatureChunk,
    "failures": RequestFailure,
    "rounds": DraftRound,
    "path_batches": PathBatch,
}
_EVENTS = {PromptInfo: "prompt_info", FinishInfo: "finish"}

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Generic[Item]):
    """What one session message held.

    Args:
        rejected: One failure per entry that could not be read.
        load: The sender's load, in replies that carry it.
    """

    messages: list[Item]
    rejected: list[RequestFailure] = field(default_factory=list)
    load: WorkerLoad | None = None


def pack_target_request(
    messages: Iterable[TargetCommand],
) -> target_pb2.TargetServiceSessionRequest:
    """Pack what an orchestrator tells a target."""
    return _pack(target_pb2.TargetServiceSessionRequest, _TARGET_COMMANDS, messages)


def unpack_target_request(
    batch: target_pb2.TargetServiceSessionRequest,
) -> Batch[TargetCommand]:
    """Unpack what an orchestrator sent to a target."""
    return _unpack(batch, _TARGET_COMMANDS)


def pack_target_response(
    messages: Iterable[TargetReply], load: WorkerLoad
) -> target_pb2.TargetServiceSessionResponse:
    """Pack what a target answers: paths that say no more than tokens as columns."""
    plain: list[AcceptedPath] = []
    others: list[TargetReply] = []
    for message in messages:
        if isinstance(message, AcceptedPath) and is_plain(message):
            plain.append(message)
        else:
            others.append(message)
    response = target_pb2.TargetServiceSessionResponse
    columns = {"path_batch": paths_arguments(plain)} if plain else {}
    return _pack(response, _TARGET_REPLIES, others, load=_brief(load), **columns)


def unpack_target_response(
    batch: target_pb2.TargetServiceSessionResponse,
) -> Batch[TargetReply]:
    """Unpack what a target answered.

    Columns come before what ends requests. If they cannot be read they are rejected as a whole:
    nothing in them can be relied on.
    """
    first = _unpack(batch, _BEFORE_PATHS)
    paths: list[Any] = []
    rejected: list[RequestFailure] = []
    if batch.HasField("path_batch"):
        try:
            paths += paths_from_proto(batch.path_batch)
        except InvalidArgumentError as error:
            ids = set(batch.path_batch.request_ids)
            rejected += [failure_of(error, request_id=request_id) for request_id in ids]
    others = _unpack(batch, _AFTER_PATHS)
    return Batch(
        messages=[*first.messages, *paths, *others.messages],
        rejected=[*first.rejected, *rejected, *others.rejected],
        load=from_proto(batch.load),
    )


def pack_draft_request(messages: Iterable[DraftCommand]) -> draft_pb2.DraftServiceSessionRequest:
    """Pack what an orchestrator tells a draft."""
    return _pack(draft_pb2.DraftServiceSessionRequest, _DRAFT_COMMANDS, messages)


def unpack_draft_request(batch: draft_pb2.DraftServiceSessionRequest) -> Batch[DraftCommand]:
    """Unpack what an orchestrator sent to a draft."""
    return _unpack(batch, _DRAFT_COMMANDS)


def pack_draft_response(
    messages: Iterable[DraftReply], load: WorkerLoad
) -> draft_pb2.DraftServiceSessionResponse:
    """Pack what a draft answers."""
    response = draft_pb2.DraftServiceSessionResponse
    return _pack(response, _DRAFT_REPLIES, messages, load=_brief(load))


def unpack_draft_response(batch: draft_pb2.DraftServiceSessionResponse) -> Batch[DraftReply]:
    """Unpack what a draft answered."""
    return _unpack(batch, _DRAFT_REPLIES, load=from_proto(batch.load))


def pack_feature_requests(
    commands: Iterable[SubscriptionCommand],
) -> list[target_pb2.StreamFeaturesRequest]:
    """Pack what a draft tells a target: a message per command, one for all acknowledgements."""
    acks = target_pb2.StreamFeaturesRequest()
    messages = []
    for command in commands:
        match command:
            case FeatureAck():
                acks.acks.add(**arguments_of(command))
            case FeatureSubscribe():
                messages.append(target_pb2.StreamFeaturesRequest(subscribe=to_proto(command)))
            case FeatureUnsubscribe():
                messages.append(target_pb2.StreamFeaturesRequest(unsubscribe=to_proto(command)))
    return [acks, *messages] if acks.acks else messages


def unpack_feature_request(message: target_pb2.StreamFeaturesRequest) -> Batch[SubscriptionCommand]:
    """Unpack what a draft sent to a target; a message with nothing in it is rejected."""
    name = message.WhichOneof("command")
    if name is None and not message.acks:
        error = InvalidArgumentError("command is absent or unknown", field="command")
        return Batch(messages=[], rejected=[failure_of(error)])
    commands = [getattr(message, name)] if name else []
    return _unpack_entries([*commands, *message.acks])


def pack_feature_response(
    messages: Iterable[FeatureReply], *, feature_ring: str = ""
) -> target_pb2.StreamFeaturesResponse:
    """Pack chunks and failures of a feature stream.

    Args:
        feature_ring: In the first response: the target's ring.
    """
    response = target_pb2.StreamFeaturesResponse
    return _pack(response, _FEATURE_REPLIES, messages, feature_ring=feature_ring)


def unpack_feature_response(batch: target_pb2.StreamFeaturesResponse) -> Batch[FeatureReply]:
    """Unpack chunks and failures of a feature stream."""
    return _unpack(batch, _FEATURE_REPLIES)


def pack_to_target(messages: Iterable[ToTarget]) -> peer_pb2.PeerToTarget:
    """Pack what a draft's engine tells a target's."""
    return _pack(peer_pb2.PeerToTarget, _TO_TARGET, messages)


def unpack_to_target(batch: peer_pb2.PeerToTarget) -> Batch[ToTarget]:
    """Unpack what a draft's engine sent to a target's."""
    return _unpack(batch, _TO_TARGET)


def pack_to_draft(messages: Iterable[ToDraft]) -> peer_pb2.PeerToDraft:
    """Pack what a target's engine tells a draft's."""
    return _pack(peer_pb2.PeerToDraft, _TO_DRAFT, messages)


def unpack_to_draft(batch: peer_pb2.PeerToDraft) -> Batch[ToDraft]:
    """Unpack what a target's engine sent to a draft's: rows before orders."""
    return _unpack(batch, _TO_DRAFT)


def pack_events(events: Sequence[GenerateEvent]) -> generation_pb2.GenerateResponse:
    """Pack one event of a Generate stream, or deltas that follow each other."""
    first = events[0]
    if isinstance(first, TokenDelta):
        response = generation_pb2.GenerateResponse()
        write_deltas(response.delta, cast(Any, events))
        return response
    return generation_pb2.GenerateResponse(**{_EVENTS[type(first)]: to_proto(first)})


def unpack_events(response: generation_pb2.GenerateResponse) -> list[GenerateEvent]:
    """Unpack what a message of a Generate stream holds: one event, or a delta per round.

    Raises: InvalidArgumentError if the event is of a kind that this version does not know.
    """
    name = response.WhichOneof("event")
    if name is None:
        raise InvalidArgumentError("the event is absent or unknown", field="event")
    with Within(name):
        if name == "delta":
            return [*split_delta(response.delta)]
        return [from_proto(getattr(response, name))]


def _brief(load: WorkerLoad) -> dict[str, Any]:
    """Return the load without its counts by name, which only GetInfo gives."""
    has_names = load.kernel_launches or load.counts
    return arguments_of(replace(load, kernel_launches=(), counts=()) if has_names else load)


def _pack(
    batch_type: type[Any], kinds: Mapping[str, type[Any]], messages: Iterable[Any], **others: Any
) -> Any:
    fields: dict[type[Any], list[dict[str, Any]]] = {kind: [] for kind in kinds.values()}
    for message in messages:
        fields[type(message)].append(arguments_of(message))
    return batch_type(**{name: fields[kind] for name, kind in kinds.items()}, **others)


def _unpack(
    batch: Any, kinds: Mapping[str, type[Any]], *, load: WorkerLoad | None = None
) -> Batch[Any]:
    return _unpack_entries([entry for name in kinds for entry in getattr(batch, name)], load=load)


def _unpack_entries(entries: Iterable[Any], *, load: WorkerLoad | None = None) -> Batch[Any]:
    messages: list[Any] = []
    rejected: list[RequestFailure] = []
    for entry in entries:
        try:
            messages.append(from_proto(entry))
        except InvalidArgumentError as error:
            rejected.append(failure_of(error, entry))
    return Batch(messages=messages, rejected=rejected, load=load)
