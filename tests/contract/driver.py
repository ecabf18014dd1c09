"""The other side of a worker's streams, as short as a test wants it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio

from coppice.v1 import draft_pb2_grpc, target_pb2, target_pb2_grpc
from draft_service.feature_client import FeatureClient
from shared.messages import (
    DraftOpen,
    FeatureAck,
    FeatureChunk,
    FeatureCommand,
    FeatureSubscribe,
    FeatureUnsubscribe,
    RequestFailure,
    RingSpan,
    SamplingParams,
    StoppingParams,
    TargetOpen,
    TokenTree,
    VerifyRound,
    batches,
)
from shared.peer.ring import RING_DIR, RingReader
from shared.rpc.channel import open_channel

REPLY_TIMEOUT_S = 60.0
Kind = TypeVar("Kind")


class Stream:
    """One client stream whose replies are taken by kind, in order."""

    def __init__(
        self, call: Any, pack: Callable[[Sequence[Any]], Any], unpack: Callable[[Any], Any]
    ) -> None:
        self.call = call
        self.raw: list[Any] = []  # every response message
        self.load: Any = None
        self._pack = pack
        self._unpack = unpack
        self._inbox: list[Any] = []
        self._reading: asyncio.Future[Any] | None = None

    async def send(self, *messages: Any) -> None:
        """Write one batch."""
        await self.call.write(self._pack(messages))

    async def next(self, kind: type[Kind], request_id: str | None = None) -> Kind:
        """Return the next reply of a kind (of a request) and leave the others for later.

        Raises: EOFError if the server ends the stream, AioRpcError if it breaks.
        """
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            while True:
                for index, message in enumerate(self._inbox):
                    if isinstance(message, kind) and request_id in (None, message.request_id):
                        return self._inbox.pop(index)
                await self._receive()

    async def settle(self, seconds: float = 0.1) -> list[Any]:
        """Return whatever arrives within a while, and everything that was left."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await self._receive()
        except TimeoutError:
            inbox, self._inbox = self._inbox, []
            return inbox

    async def until(self, condition: Callable[[], bool]) -> None:
        """Take messages until a condition holds.

        Raises: EOFError if the server ends the stream, AioRpcError if it breaks.
        """
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            while not condition():
                await self._receive()

    async def close(self) -> None:
        """Half-close and wait for the end."""
        await self.call.done_writing()
        with contextlib.suppress(EOFError):
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                while True:
                    await self._receive()

    async def _receive(self) -> None:
        # A read that is cancelled takes its call with it: let a timeout leave it alone.
        self._reading = self._reading or asyncio.ensure_future(self.call.read())
        response = await asyncio.shield(self._reading)
        self._reading = None
        if response is grpc.aio.EOF:
            raise EOFError("the server ended the stream")
        self.raw.append(response)
        batch = self._unpack(response)
        assert batch.rejected == []
        self.load = batch.load
        self._inbox += batch.messages


class Peer:
    """A channel to one worker and the streams opened through it."""

    def __init__(self, address: str) -> None:
        self.channel = open_channel(address)
        self.target = target_pb2_grpc.TargetServiceStub(self.channel)
        self.draft = draft_pb2_grpc.DraftServiceStub(self.channel)

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    def target_session(self) -> Stream:
        """Open a session with a target."""
        call = self.target.Session(wait_for_ready=True)
        return Stream(call, batches.pack_target_request, batches.unpack_target_response)

    def draft_session(self) -> Stream:
        """Open a session with a draft."""
        call = self.draft.Session(wait_for_ready=True)
        return Stream(call, batches.pack_draft_request, batches.unpack_draft_response)

    def feature_stream(self) -> Stream:
        """Open a feature stream; each `send` takes one command."""
        call = self.target.StreamFeatures(wait_for_ready=True)
        return Stream(call, _pack_one, batches.unpack_feature_response)


def _pack_one(commands: Sequence[Any]) -> target_pb2.StreamFeaturesRequest:
    (message,) = batches.pack_feature_requests(commands)
    return message


def target_open(
    request_id: str = "a",
    *,
    prompt: Sequence[int] = (1, 2, 3, 4, 5),
    target_epoch: int = 1,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    wants_features: bool = True,
) -> TargetOpen:
    return TargetOpen(
        request_id=request_id,
        target_epoch=target_epoch,
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        sampling=sampling or SamplingParams(),
        stopping=StoppingParams(max_new_tokens=max_new_tokens),
        wants_features=wants_features,
    )


def draft_open(
    target_address: str,
    request_id: str = "a",
    *,
    prompt: Sequence[int] = (1, 2, 3, 4, 5),
    target_epoch: int = 1,
    draft_epoch: int = 1,
    sampling: SamplingParams | None = None,
) -> DraftOpen:
    return DraftOpen(
        request_id=request_id,
        target_epoch=target_epoch,
        draft_epoch=draft_epoch,
        target_address=target_address,
        token_ids=tuple(prompt),
        sampling=sampling or SamplingParams(),
    )


def verify_after(path: Any, tree: TokenTree | None = None, **changes: Any) -> VerifyRound:
    """Return the order that follows an accepted path."""
    fields: dict[str, Any] = {
        "request_id": path.request_id,
        "target_epoch": path.target_epoch,
        "round_idx": path.round_idx + 1,
        "seq_len": path.seq_len,
        "root_token_id": path.token_ids[-1],
        "tree": tree,
    }
    return VerifyRound(**(fields | changes))


def tree_after(
    path: Any,
    token_ids: Sequence[int],
    parent_index: Sequence[int],
    *,
    root: int | None = None,
    scores: Sequence[float] = (),
) -> TokenTree:
    """Return a tree under the bonus token of an accepted path (or under another `root`)."""
    return TokenTree(
        request_id=path.request_id,
        target_epoch=path.target_epoch,
        draft_epoch=1,
        round_idx=path.round_idx + 1,
        seq_len=path.seq_len,
        token_ids=(path.token_ids[-1] if root is None else root, *token_ids),
        parent_index=(-1, *parent_index),
        cumulative_logprobs=tuple(scores),
    )


def subscribe(
    request_id: str = "a", *, target_epoch: int = 1, draft_epoch: int = 0, from_position: int = 0
) -> FeatureSubscribe:
    return FeatureSubscribe(
        request_id=request_id,
        target_epoch=target_epoch,
        draft_epoch=draft_epoch,
        from_position=from_position,
    )


async def read_rows(stream: Stream, request_id: str, start: int, end: int) -> bytes:
    """Read chunks until rows [start, end) are complete; they must come in order, without gaps."""
    data = b""
    position = start
    while position < end:
        chunk = await stream.next(FeatureChunk, request_id)
        assert chunk.start == position, "rows must come in order"
        position += chunk.shape[0]
        assert isinstance(chunk.data, bytes)
        data += chunk.data
    assert position == end
    return data


async def failure(stream: Stream, request_id: str | None = None) -> RequestFailure:
    return await stream.next(RequestFailure, request_id)


class Listener:
    """Collects what a FeatureClient hands to its engine."""

    def __init__(
        self,
        *,
        reconnect_timeout_s: float = 60.0,
        ring_dir: Path = RING_DIR,
    ) -> None:
        self.client = FeatureClient(
            self._take, reconnect_timeout_s=reconnect_timeout_s, ring_dir=ring_dir
        )
        self._rings = RingReader(ring_dir)
        self.chunks: list[FeatureChunk] = []
        self.failures: list[RequestFailure] = []

    async def __aenter__(self) -> Listener:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    def tell(
        self,
        address: str,
        command: FeatureSubscribe | FeatureAck | FeatureUnsubscribe,
        *,
        avoids_ring: bool = False,
    ) -> None:
        self.client.handle(
            FeatureCommand(target_address=address, command=command, avoids_ring=avoids_ring)
        )

    def subscribe(
        self,
        address: str,
        *,
        from_position: int = 0,
        target_epoch: int = 1,
        avoids_ring: bool = False,
    ) -> None:
        command = subscribe(target_epoch=target_epoch, from_position=from_position)
        self.tell(address, command, avoids_ring=avoids_ring)

    @property
    def end(self) -> int:
        return self.chunks[-1].start + self.chunks[-1].shape[0] if self.chunks else 0

    @property
    def data(self) -> bytes:
        """Rows from the first chunk on; they must be consecutive."""
        position = self.chunks[0].start
        for chunk in self.chunks:
            assert chunk.start == position
            position += chunk.shape[0]
        return b"".join(map(self._read, self.chunks))

    @property
    def rings(self) -> list[str]:
        """Ring of each chunk; "": its rows came as bytes."""
        return [c.data.ring if isinstance(c.data, RingSpan) else "" for c in self.chunks]

    def _read(self, chunk: FeatureChunk) -> bytes:
        if not isinstance(chunk.data, RingSpan):
            return chunk.data
        rows = self._rings.read(chunk.data)
        assert rows is not None
        return rows.tobytes()

    def _take(self, messages: Any) -> None:
        for message in messages:
            (self.chunks if isinstance(message, FeatureChunk) else self.failures).append(message)
