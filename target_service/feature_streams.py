"""Feature streams of a target, one per draft worker: pipes between them and the engine.

The engine decides what is sent and in what order (features.py). The front knows which stream a
request's newest subscriber has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from coppice.v1 import target_pb2
from shared.errors import StaleStateError, UnavailableError
from shared.messages import (
    MAX_CHUNK_BYTES,
    FeatureAck,
    FeatureChunk,
    FeatureFailure,
    FeatureSubscribe,
    FeatureUnsubscribe,
    RequestFailure,
)
from shared.messages.batches import pack_feature_response, unpack_feature_request
from shared.rpc.outbox import Outbox, write
from shared.rpc.status import failure_of

Epochs = tuple[int, int]
"""target_epoch, draft_epoch"""
MAX_UNREAD_BYTES = 1 << 30
"""Of feature rows that wait for one draft worker."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Stream:
    outbox: Outbox = field(default_factory=Outbox)
    epochs: dict[str, Epochs] = field(default_factory=dict)  # of its subscriptions
    num_bytes: int = 0  # of rows that wait
    is_unread: bool = False  # there are too many of them


class FeatureHub:
    """All feature streams of a target and the routes of its subscriptions.

    Args:
        send: Queues messages for the engine.
    """

    def __init__(self, send: Callable[[Sequence[Any]], None]) -> None:
        self._send = send
        self._routes: dict[str, _Stream] = {}
        self.ring_name = ""

    @property
    def num_subscriptions(self) -> int:
        """Return the requests that some draft listens to."""
        return len(self._routes)

    async def serve(
        self,
        request_iterator: AsyncIterator[target_pb2.StreamFeaturesRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Serve one stream until its draft worker closes it."""
        stream = _Stream()
        # The stream is up.
        await context.write(pack_feature_response([], feature_ring=self.ring_name))
        reader = asyncio.create_task(self._read(stream, request_iterator))
        reader.add_done_callback(lambda _: stream.outbox.close())
        try:
            with contextlib.suppress(EOFError):
                while True:
                    for batch in _bounded(await stream.outbox.take()):
                        await write(context, pack_feature_response(batch))
                        stream.num_bytes -= _num_bytes(batch)
            if stream.is_unread:
                raise UnavailableError(
                    "too many features of this stream are unread; subscribe again",
                    reason="SLOW_READER",
                )
            await reader
        finally:
            reader.cancel()
            self._release(stream)

    def deliver(self, outputs: Sequence[FeatureChunk | FeatureFailure]) -> None:
        """Give the engine's chunks and failures to the subscribers."""
        for output in outputs:
            stream = self._routes.get(output.request_id)
            if stream is None:
                continue
            if isinstance(output, FeatureChunk):
                self._put(stream, output)
                continue
            stream.outbox.put([output.failure])
            if _epochs_of(output.failure) == stream.epochs[output.request_id]:
                self._forget(output.request_id)

    async def _read(
        self, stream: _Stream, request_iterator: AsyncIterator[target_pb2.StreamFeaturesRequest]
    ) -> None:
        async for request in request_iterator:
            batch = unpack_feature_request(request)
            if batch.rejected:
                stream.outbox.put(batch.rejected)
            self._send([command for command in batch.messages if self._admit(stream, command)])
            await stream.outbox.wait_room()

    def _put(self, stream: _Stream, chunk: FeatureChunk) -> None:
        """Let a chunk leave; a stream whose draft does not read ends, and rows can be replayed."""
        stream.outbox.put([chunk])
        stream.num_bytes += chunk.num_inline_bytes
        if stream.num_bytes > MAX_UNREAD_BYTES:
            stream.is_unread = True
            stream.outbox.discard()
            self._release(stream)

    def _admit(self, stream: _Stream, command: Any) -> bool:
        """Update the routes; drop what only the newest subscriber may say."""
        request_id: str = command.request_id
        owner = self._routes.get(request_id)
        match command:
            case FeatureSubscribe():
                epochs = _epochs_of(command)
                if owner is not None and _is_older(epochs, owner.epochs[request_id]):
                    stream.outbox.put([_late(request_id, epochs)])
                    return False
                if owner is not None and owner is not stream:
                    owner.outbox.put([_replaced(request_id, owner.epochs.pop(request_id))])
                self._routes[request_id] = stream
                stream.epochs[request_id] = epochs
                return True
            case FeatureUnsubscribe() if owner is stream:
                if command.target_epoch >= stream.epochs[request_id][0]:
                    self._forget(request_id)
                return True
            case FeatureAck():
                return owner is stream
        return False

    def _forget(self, request_id: str) -> None:
        del self._routes.pop(request_id).epochs[request_id]

    def _release(self, stream: _Stream) -> None:
        stream.outbox.close()
        ends = [
            FeatureUnsubscribe(request_id=request_id, target_epoch=target_epoch)
            for request_id, (target_epoch, _) in stream.epochs.items()
        ]
        for request_id in list(stream.epochs):
            self._forget(request_id)
        self._send(ends)


def _bounded(messages: Sequence[Any]) -> Iterator[list[Any]]:
    """Group messages so that a response carries less than the bytes of two full chunks."""
    group: list[Any] = []
    num_bytes = 0
    for message in messages:
        group.append(message)
        num_bytes += _num_bytes([message])
        if num_bytes >= MAX_CHUNK_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _num_bytes(messages: Sequence[Any]) -> int:
    return sum([m.num_inline_bytes for m in messages if isinstance(m, FeatureChunk)])


def _epochs_of(message: FeatureSubscribe | RequestFailure) -> Epochs:
    return message.target_epoch, message.draft_epoch


def _is_older(epochs: Epochs, held: Epochs) -> bool:
    """Return whether a subscription is older than the one held; a draft may not say its epoch."""
    return epochs < held if epochs[1] else epochs[0] < held[0]


def _replaced(request_id: str, epochs: Epochs) -> RequestFailure:
    error = StaleStateError(
        "a newer subscriber takes this request's features", reason="SUBSCRIPTION_REPLACED"
    )
    return _failure(error, request_id, epochs)


def _late(request_id: str, epochs: Epochs) -> RequestFailure:
    error = StaleStateError(
        f"target_epoch {epochs[0]} and draft_epoch {epochs[1]} are over, newer ones have a "
        "subscriber",
        field="target_epoch",
    )
    return _failure(error, request_id, epochs)


def _failure(error: StaleStateError, request_id: str, epochs: Epochs) -> RequestFailure:
    return failure_of(error, request_id=request_id, target_epoch=epochs[0], draft_epoch=epochs[1])
