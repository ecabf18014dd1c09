"""A draft worker's feature streams: resumption, gaps, bad rows, targets that stay away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from coppice.v1 import target_pb2_grpc
from shared.errors import StaleStateError, StatusCode
from shared.messages import (
    AcceptedPath,
    FeatureAck,
    FeatureChunk,
    FeatureSubscribe,
    FeatureUnsubscribe,
    RequestFailure,
)
from shared.messages.batches import pack_feature_response, unpack_feature_request
from shared.rpc.channel import server_options
from shared.rpc.status import failure_of
from tests.contract.driver import Listener, Peer, subscribe, target_open, verify_after
from tests.fakes import WIDTH, eventually, fake_target, feature_rows
from tests.scrape import free_ports

pytestmark = pytest.mark.asyncio

PROMPT = tuple(range(100, 140))


class ScriptedTarget(target_pb2_grpc.TargetServiceServicer):
    """A target whose feature stream says exactly what a test tells it to."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.script: Callable[[Any], list[Any]] = lambda command: []
        self.num_streams = self.num_requests = 0
        self.status: grpc.StatusCode | None = None
        self._calls: list[grpc.aio.ServicerContext] = []

    def break_streams(self) -> None:
        """End every stream that is up, as a target that dies does."""
        for context in self._calls:
            asyncio.ensure_future(context.abort(grpc.StatusCode.UNAVAILABLE, "scripted"))
        self._calls.clear()

    async def StreamFeatures(
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> None:
        self.num_streams += 1
        if self.status is not None:
            await context.abort(self.status, "scripted")
        await context.write(pack_feature_response([]))
        self._calls.append(context)
        async for request in request_iterator:
            self.num_requests += 1
            for command in unpack_feature_request(request).messages:
                self.commands.append(command)
                for response in self.script(command):
                    await context.write(response)


@pytest_asyncio.fixture
async def scripted() -> AsyncIterator[tuple[ScriptedTarget, str]]:
    servicer = ScriptedTarget()
    server = grpc.aio.server(options=server_options())
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(0)


def chunk_message(start: int, end: int, **handle: Any) -> Any:
    message = pack_feature_response(
        [
            FeatureChunk(
                request_id="a",
                target_epoch=1,
                start=start,
                shape=(end - start, WIDTH),
                dtype="float32",
                data=feature_rows(PROMPT, start, end),
            )
        ]
    )
    for name, value in handle.items():
        field = message.chunks[0].handle
        if isinstance(value, list):
            del getattr(field, name)[:]
            getattr(field, name).extend(value)
        else:
            setattr(field, name, value)
    return message


async def test_rows_arrive_and_acknowledgements_go_back() -> None:
    async with fake_target() as target, Peer(target.address) as peer, Listener() as listener:
        session = peer.target_session()
        await session.send(target_open(prompt=PROMPT))
        listener.subscribe(target.address, from_position=3)
        await eventually(lambda: listener.end == 40)
        assert listener.data == feature_rows(PROMPT, 3, 40)
        listener.tell(target.address, FeatureAck(request_id="a", target_epoch=1, position=40))
        await eventually(lambda: target.engine.requests["a"].acknowledged == 40)
        listener.tell(target.address, FeatureUnsubscribe(request_id="a", target_epoch=1))
        await eventually(lambda: target.worker.servicer.features.num_subscriptions == 0)


async def test_requests_of_one_target_share_one_stream() -> None:
    async with fake_target() as target, Peer(target.address) as peer, Listener() as listener:
        session = peer.target_session()
        for request_id in ("a", "b", "c"):
            await session.send(target_open(request_id, prompt=PROMPT))
            command = FeatureSubscribe(request_id=request_id, target_epoch=1, from_position=0)
            listener.tell(target.address, command)
        await eventually(lambda: sum(chunk.shape[0] for chunk in listener.chunks) == 120)
        assert target.worker.servicer.features.num_subscriptions == 3
        assert len({id(s) for s in target.worker.servicer.features._routes.values()}) == 1


async def test_broken_stream_resumes_from_the_last_row() -> None:
    async with Listener() as listener:
        port = free_ports(1)
        async with fake_target(port=port) as target, Peer(target.address) as peer:
            session = peer.target_session()
            await session.send(target_open(prompt=PROMPT))
            path = await session.next(AcceptedPath)
            listener.subscribe(target.address)
            await eventually(lambda: listener.end == 40)
        # The target is gone; another one on the same address rebuilds the request one token later.
        tokens = (*PROMPT, *path.token_ids)
        async with fake_target(port=port) as target, Peer(target.address) as peer:
            session = peer.target_session()
            await session.send(target_open(prompt=tokens))
            await eventually(lambda: listener.end == 41)
            assert listener.data == feature_rows(tokens, 0, 41)
            subscriptions = [
                message
                for message in target.engine.received
                if isinstance(message, FeatureSubscribe)
            ]
            assert [message.from_position for message in subscriptions] == [40]
            path = await session.next(AcceptedPath)
            await session.send(verify_after(path))
            await eventually(lambda: listener.end == 42)
        assert listener.failures == []


async def test_target_that_stays_away_fails_the_subscription() -> None:
    async with Listener(reconnect_timeout_s=1.0) as listener:
        listener.subscribe("127.0.0.1:1")
        await eventually(lambda: bool(listener.failures))
        (failed,) = listener.failures
        assert (failed.request_id, failed.target_epoch) == ("a", 1)
        assert failed.code == StatusCode.UNAVAILABLE
        # A later subscription dials again.
        async with fake_target() as target, Peer(target.address) as peer:
            session = peer.target_session()
            await session.send(target_open(prompt=PROMPT))

            def is_answered(num_failures: int) -> bool:
                return listener.end == 40 or len(listener.failures) > num_failures

            while listener.end != 40:  # it may take longer to connect than the listener waits
                listener.subscribe(target.address)
                await eventually(partial(is_answered, len(listener.failures)))


async def test_answer_that_no_retry_changes_fails_the_subscription_at_once(
    scripted: tuple[ScriptedTarget, str],
) -> None:
    target, address = scripted
    target.status = grpc.StatusCode.UNIMPLEMENTED
    async with Listener() as listener:
        listener.subscribe(address)
        await eventually(lambda: bool(listener.failures))
        assert target.num_streams == 1


async def test_failure_of_an_older_draft_is_not_the_newer_ones(
    scripted: tuple[ScriptedTarget, str],
) -> None:
    target, address = scripted

    def refuse(command: Any) -> list[Any]:
        older = failure_of(StaleStateError("older"), request_id="a", target_epoch=1, draft_epoch=1)
        own = replace(older, draft_epoch=command.draft_epoch, message="own")
        return [pack_feature_response([older]), pack_feature_response([own])]

    target.script = refuse
    async with Listener() as listener:
        listener.tell(address, subscribe(draft_epoch=2))
        await eventually(lambda: bool(listener.failures))
        assert [failure.message for failure in listener.failures] == ["own"]


async def test_loading_target_is_tried_again(scripted: tuple[ScriptedTarget, str]) -> None:
    target, address = scripted
    target.status = grpc.StatusCode.UNAVAILABLE
    target.script = lambda command: [chunk_message(0, 8)]
    async with Listener() as listener:
        listener.subscribe(address)
        await eventually(lambda: target.num_streams >= 2)
        target.status = None
        await eventually(lambda: listener.end == 8)
        assert listener.failures == []


async def test_rows_go_to_the_engine_as_they_came(scripted: tuple[ScriptedTarget, str]) -> None:
    """The engine cuts what overlaps and asks for what is missing; a new stream goes on after the
    rows that came without a gap.
    """
    target, address = scripted

    def answer(command: Any) -> list[Any]:
        if command.from_position == 0:
            return [
                chunk_message(0, 8),
                chunk_message(4, 12),
                chunk_message(2, 6),
                chunk_message(20, 24),
                chunk_message(24, 28),
            ]
        return [chunk_message(command.from_position, 30)]

    target.script = answer
    async with Listener() as listener:
        listener.subscribe(address)
        await eventually(lambda: listener.end == 28)
        starts = [0, 4, 2, 20, 24]
        assert [chunk.start for chunk in listener.chunks] == starts
        target.break_streams()
        await eventually(lambda: listener.end == 30)
        assert [chunk.start for chunk in listener.chunks] == [*starts, 12]
        assert [command.from_position for command in target.commands] == [0, 12]


@pytest.mark.parametrize(
    ("handle", "field"),
    [
        ({"shape": [8, 5]}, "handle.inline_data"),
        ({"shape": [8]}, "handle.shape"),
        ({"shape": [0, 6]}, "handle.shape"),
        ({"dtype": 0}, "handle.dtype"),
        ({"dtype": 9}, "handle.dtype"),
        ({"inline_data": b"short"}, "handle.inline_data"),
    ],
)
async def test_malformed_handle_is_refused(
    scripted: tuple[ScriptedTarget, str], handle: dict[str, Any], field: str
) -> None:
    target, address = scripted
    target.script = lambda command: (
        [chunk_message(0, 8, **handle)] if isinstance(command, FeatureSubscribe) else []
    )
    async with Listener() as listener:
        listener.subscribe(address)
        await eventually(lambda: bool(listener.failures))
        (failed,) = listener.failures
        assert (failed.request_id, failed.code, failed.field) == (
            "a",
            StatusCode.INVALID_ARGUMENT,
            field,
        )
        assert listener.chunks == []
        await eventually(lambda: isinstance(target.commands[-1], FeatureUnsubscribe))


async def test_rows_and_failures_of_an_older_epoch_are_dropped(
    scripted: tuple[ScriptedTarget, str],
) -> None:
    target, address = scripted
    stale = pack_feature_response(
        [RequestFailure(request_id="a", code=9, reason="STALE_STATE", message="", target_epoch=1)]
    )
    fresh = chunk_message(0, 8)
    fresh.chunks[0].target_epoch = 2
    target.script = lambda command: [chunk_message(0, 4), stale, fresh]
    async with Listener() as listener:
        listener.subscribe(address, target_epoch=2)
        await eventually(lambda: bool(listener.chunks))
        assert [(c.target_epoch, c.shape[0]) for c in listener.chunks] == [(2, 8)]
        assert listener.failures == []


async def test_acknowledgements_that_wait_are_merged(
    scripted: tuple[ScriptedTarget, str],
) -> None:
    target, address = scripted
    async with Listener() as listener:
        listener.subscribe(address)
        await eventually(lambda: len(target.commands) == 1)
        for position in range(1, 101):
            listener.tell(address, FeatureAck(request_id="a", target_epoch=1, position=position))
        await eventually(lambda: getattr(target.commands[-1], "position", 0) == 100)
        assert len(target.commands) < 10


async def test_acknowledgements_of_many_requests_share_messages(
    scripted: tuple[ScriptedTarget, str],
) -> None:
    target, address = scripted
    async with Listener() as listener:
        listener.subscribe(address)
        await eventually(lambda: len(target.commands) == 1)
        for i in range(32):
            listener.tell(address, FeatureAck(request_id=f"r{i}", target_epoch=1, position=4))
        await eventually(lambda: len(target.commands) == 33)
        assert target.num_requests <= 4


async def test_nothing_is_dialled_without_a_subscription(
    scripted: tuple[ScriptedTarget, str],
) -> None:
    target, address = scripted
    async with Listener() as listener:
        listener.tell(address, FeatureUnsubscribe(request_id="a", target_epoch=1))
        listener.tell(address, FeatureAck(request_id="a", target_epoch=1, position=1))
        await asyncio.sleep(0.1)
        assert target.num_streams == 0
