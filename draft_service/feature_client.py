"""Feature streams of a draft: one per target address, kept up while anything is subscribed there.

A pipe: rows go to the engine as they came, which keeps them in order and asks for what is missing.
Only reconnecting is done here. A broken stream is dialled again with backoff, and every
subscription goes on after the rows that were passed on without a gap. A request whose rows cannot
be had any more is handed to the engine as a RequestFailure.

A target on this host names the ring in shared memory that it writes rows to. A subscription that
repeats the nonce found there gets spans of the ring; any other gets bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from coppice.v1 import target_pb2, target_pb2_grpc
from shared.access.caller import NOBODY, Caller
from shared.errors import CoppiceError, UnavailableError
from shared.messages import (
    FeatureAck,
    FeatureChunk,
    FeatureCommand,
    FeatureSubscribe,
    FeatureUnsubscribe,
    RequestFailure,
)
from shared.messages.batches import (
    SubscriptionCommand,
    pack_feature_requests,
    unpack_feature_response,
)
from shared.peer.ring import RING_DIR, read_nonce
from shared.rpc.channel import open_channel
from shared.rpc.health_names import TARGET_SERVICE
from shared.rpc.outbox import Outbox
from shared.rpc.protocol import METADATA
from shared.rpc.status import failure_of, from_rpc_error

logger = logging.getLogger(__name__)

# A target may answer these while it restarts; anything else is an answer.
_TRANSIENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_METHOD = f"/{TARGET_SERVICE}/StreamFeatures"

Deliver = Callable[[Sequence[FeatureChunk | RequestFailure]], None]


class FeatureClient:
    """Everything that a draft worker hears from targets.

    Args:
        deliver: Takes chunks as they came, and failures of subscriptions.
        reconnect_timeout_s: A target that cannot be reached for so long fails its subscriptions.
        ring_dir: Where the rings of targets on this host are.
        caller: What targets are shown.
    """

    def __init__(
        self,
        deliver: Deliver,
        *,
        reconnect_timeout_s: float = 30.0,
        ring_dir: Path = RING_DIR,
        caller: Caller = NOBODY,
    ) -> None:
        self._deliver = deliver
        self._reconnect_timeout_s = reconnect_timeout_s
        self._ring_dir = ring_dir
        self._caller = caller
        self._streams: dict[str, _TargetStream] = {}

    def handle(self, command: FeatureCommand) -> None:
        """Carry out what the engine asks for."""
        stream = self._streams.get(command.target_address)
        if stream is None or stream.is_over:
            if not isinstance(command.command, FeatureSubscribe):
                return
            stream = _TargetStream(
                command.target_address,
                self._deliver,
                self._reconnect_timeout_s,
                self._ring_dir,
                self._caller,
            )
            self._streams[command.target_address] = stream
            stream.task = asyncio.create_task(self._run(stream))
        stream.handle(command.command, avoids_ring=command.avoids_ring)

    async def close(self) -> None:
        """Close every stream."""
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, stream: _TargetStream) -> None:
        try:
            await stream.run()
        except Exception:
            logger.exception("the feature stream from %s failed", stream.address)
            stream.fail_all(UnavailableError("the feature stream failed"))
        finally:
            if self._streams.get(stream.address) is stream:
                del self._streams[stream.address]


@dataclass(slots=True, kw_only=True, eq=False)
class _Subscription:
    """What the engine asked for.

    Args:
        next_position: Rows from it on are asked for when the stream is up again.
    """

    target_epoch: int
    draft_epoch: int
    next_position: int
    avoids_ring: bool


class _TargetStream:
    """The stream from one target address and its subscriptions."""

    def __init__(
        self,
        address: str,
        deliver: Deliver,
        reconnect_timeout_s: float,
        ring_dir: Path,
        caller: Caller,
    ) -> None:
        self.address = address
        self.task: asyncio.Task[None] | None = None
        self.is_over = False
        self._deliver = deliver
        self._reconnect_timeout_s = reconnect_timeout_s
        self._ring_dir = ring_dir
        self._caller = caller
        self._ring_name = ""
        self._subscriptions: dict[str, _Subscription] = {}
        self._outbox: Outbox | None = None  # of the stream that is up; a new one reads the table

    def handle(self, command: SubscriptionCommand, *, avoids_ring: bool = False) -> None:
        """Update the table of subscriptions and tell the target, if it is connected."""
        match command:
            case FeatureSubscribe():
                self._subscriptions[command.request_id] = _Subscription(
                    target_epoch=command.target_epoch,
                    draft_epoch=command.draft_epoch,
                    next_position=command.from_position,
                    avoids_ring=avoids_ring,
                )
                command = self._resume(command.request_id)
            case FeatureUnsubscribe():
                held = self._subscriptions.get(command.request_id)
                if held is not None and held.target_epoch <= command.target_epoch:
                    del self._subscriptions[command.request_id]
        if self._outbox is not None:
            self._outbox.put([command])

    async def run(self) -> None:
        """Keep the stream up while anything is subscribed."""
        channel = open_channel(self.address, tls=self._caller.tls)
        stub = target_pb2_grpc.TargetServiceStub(channel)
        try:
            while self._subscriptions:
                try:
                    async for attempt in self._retrying():
                        with attempt:
                            await self._stream(stub)
                except grpc.aio.AioRpcError as error:
                    self.fail_all(from_rpc_error(error))
        finally:
            self.is_over = True
            await channel.close()

    def fail_all(self, error: CoppiceError) -> None:
        """Give every subscription up."""
        subscriptions, self._subscriptions = self._subscriptions, {}
        self._deliver(
            [
                failure_of(
                    error,
                    request_id=request_id,
                    target_epoch=held.target_epoch,
                    draft_epoch=held.draft_epoch,
                )
                for request_id, held in subscriptions.items()
            ]
        )

    def _retrying(self) -> AsyncRetrying:
        def log(state: Any) -> None:
            logger.warning("features from %s: %s; again", self.address, _say(state))

        return AsyncRetrying(
            retry=retry_if_exception(_is_transient),
            wait=wait_random_exponential(multiplier=_FIRST_BACKOFF_S, max=_MAX_BACKOFF_S),
            stop=stop_after_delay(self._reconnect_timeout_s),
            before_sleep=log,
            reraise=True,
        )

    async def _stream(self, stub: Any) -> None:
        """Run one stream; returns when one that was up breaks, raises if it never came up."""
        call = stub.StreamFeatures(metadata=(*METADATA, *self._caller.metadata(_METHOD)))
        outbox = Outbox()
        writer = asyncio.create_task(_write(call, outbox))
        is_up = False
        try:
            async for response in call:
                if not is_up:
                    is_up = True
                    self._ring_name = response.feature_ring
                    self._log_path()
                    self._outbox = outbox
                    outbox.put([self._resume(request_id) for request_id in self._subscriptions])
                self._take(response)
            if not is_up:
                raise _unavailable("the target ended the stream")
        except grpc.aio.AioRpcError as error:
            if self._subscriptions and not (is_up and _is_transient(error)):
                raise
            logger.warning("the feature stream from %s broke: %s", self.address, error.details())
        finally:
            self._outbox = None
            outbox.close()
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _take(self, response: target_pb2.StreamFeaturesResponse) -> None:
        batch = unpack_feature_response(response)
        passed: list[FeatureChunk | RequestFailure] = []
        for message in batch.messages:
            held = self._subscriptions.get(message.request_id)
            if held is None or held.target_epoch != message.target_epoch:
                continue
            if isinstance(message, FeatureChunk):
                if message.start <= held.next_position:  # else the engine asks for what is missing
                    end = message.start + message.shape[0]
                    held.next_position = max(held.next_position, end)
                passed.append(message)
            elif message.draft_epoch in (0, held.draft_epoch):
                del self._subscriptions[message.request_id]
                passed.append(message)
        for failure in batch.rejected:
            passed += self._reject(failure)
        if passed:
            self._deliver(passed)

    def _reject(self, failure: RequestFailure) -> list[RequestFailure]:
        """Give up a subscription whose rows cannot be read."""
        held = self._subscriptions.get(failure.request_id)
        if held is None or held.target_epoch != failure.target_epoch:
            return []
        logger.error("features of %s cannot be read: %s", failure.request_id, failure.message)
        self.handle(
            FeatureUnsubscribe(request_id=failure.request_id, target_epoch=failure.target_epoch)
        )
        return [failure]

    def _resume(self, request_id: str) -> FeatureSubscribe:
        held = self._subscriptions[request_id]
        return FeatureSubscribe(
            request_id=request_id,
            target_epoch=held.target_epoch,
            from_position=held.next_position,
            draft_epoch=held.draft_epoch,
            ring_nonce=b"" if held.avoids_ring else self._read_nonce(),
        )

    def _read_nonce(self) -> bytes:
        """Return what proves to the target that its ring can be read here; empty: it cannot."""
        if not self._ring_name:
            return b""
        try:
            return read_nonce(self._ring_name, directory=self._ring_dir)
        except OSError:
            return b""

    def _log_path(self) -> None:
        if self._read_nonce():
            logger.info("features from %s come through shared memory", self.address)
        elif self._ring_name:
            logger.info("features from %s come as bytes: its memory is elsewhere", self.address)
        else:
            logger.info("features from %s come as bytes: it has no ring", self.address)


async def _write(call: Any, outbox: Outbox) -> None:
    with contextlib.suppress(EOFError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            for message in pack_feature_requests(_newest_acks(await outbox.take())):
                await call.write(message)


def _newest_acks(commands: Sequence[SubscriptionCommand]) -> list[SubscriptionCommand]:
    """Leave out acknowledgements that a later one of the same batch includes."""
    kept: list[SubscriptionCommand] = []
    seen: set[tuple[str, int]] = set()
    for command in reversed(commands):
        key = (command.request_id, command.target_epoch)
        if isinstance(command, FeatureAck):
            if key in seen:
                continue
            seen.add(key)
        kept.append(command)
    return kept[::-1]


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and error.code() in _TRANSIENT


def _unavailable(details: str) -> grpc.aio.AioRpcError:
    empty = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, details=details)


def _say(state: Any) -> str:
    error = state.outcome.exception()
    return (isinstance(error, grpc.aio.AioRpcError) and error.details()) or str(error)
