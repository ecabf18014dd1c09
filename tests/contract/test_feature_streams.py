"""TargetService.StreamFeatures: rows in order, acknowledged, to the newest subscriber only."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from coppice.v1 import target_pb2
from shared.errors import StatusCode
from shared.messages import (
    MAX_CHUNK_BYTES,
    AcceptedPath,
    FeatureAck,
    FeatureChunk,
    FeatureUnsubscribe,
    TargetAdmitted,
    TargetClose,
)
from shared.rpc.status import from_rpc_error
from tests.contract.driver import (
    Peer,
    Stream,
    failure,
    read_rows,
    subscribe,
    target_open,
    verify_after,
)
from tests.fakes import FakeTarget, eventually, fake_target, feature_rows

pytestmark = pytest.mark.asyncio

PROMPT = tuple(range(100, 140))


@contextlib.asynccontextmanager
async def fake_drafts(count: int = 1, engine: FakeTarget | None = None) -> AsyncIterator[Any]:
    """Yield a target, an orchestrator's session with it, and the feature streams of some drafts."""
    async with contextlib.AsyncExitStack() as stack:
        target = await stack.enter_async_context(fake_target(engine or FakeTarget()))
        peer, *drafts = [
            await stack.enter_async_context(Peer(target.address)) for _ in range(count + 1)
        ]
        yield target, peer.target_session(), *(draft.feature_stream() for draft in drafts)


async def _open(session: Stream, request_id: str = "a") -> AcceptedPath:
    await session.send(target_open(request_id, prompt=PROMPT))
    return await session.next(AcceptedPath, request_id)


async def test_rows_come_in_order_and_go_on_with_every_round() -> None:
    async with fake_drafts() as (target, session, features):
        path = await _open(session)
        await features.send(subscribe())
        assert await read_rows(features, "a", 0, 40) == feature_rows(PROMPT, 0, 40)
        tokens = [*PROMPT, *path.token_ids]
        for _ in range(3):
            await session.send(verify_after(path))
            path = await session.next(AcceptedPath)
            start, end = len(tokens) - 1, path.seq_len
            assert await read_rows(features, "a", start, end) == feature_rows(tokens, start, end)
            tokens += path.token_ids


async def test_subscription_may_come_before_the_request() -> None:
    async with fake_drafts() as (target, session, features):
        await features.send(subscribe(from_position=7))
        await eventually(lambda: target.worker.servicer.features.num_subscriptions == 1)
        await _open(session)
        assert await read_rows(features, "a", 7, 40) == feature_rows(PROMPT, 7, 40)


async def test_acknowledgement_reaches_the_engine_from_the_subscriber_only() -> None:
    async with fake_target() as target, Peer(target.address) as peer, Peer(target.address) as draft:
        session, stranger = peer.target_session(), peer.feature_stream()
        features = draft.feature_stream()
        await _open(session)
        await features.send(subscribe())
        await read_rows(features, "a", 0, 40)
        await stranger.send(FeatureAck(request_id="a", target_epoch=1, position=40))
        await features.send(FeatureAck(request_id="a", target_epoch=1, position=16))
        await eventually(lambda: target.engine.requests["a"].acknowledged > 0)
        assert target.engine.requests["a"].acknowledged == 16


async def test_newest_subscriber_takes_over_and_the_older_one_is_told() -> None:
    async with fake_drafts(2) as (target, session, old, new):
        path = await _open(session)
        await old.send(subscribe())
        await read_rows(old, "a", 0, 40)
        await new.send(subscribe(from_position=32))
        assert await read_rows(new, "a", 32, 40) == feature_rows(PROMPT, 32, 40)
        refusal = await failure(old)
        assert (refusal.reason, refusal.code) == (
            "SUBSCRIPTION_REPLACED",
            StatusCode.FAILED_PRECONDITION,
        )
        await old.close()  # its end must not end the newer subscription
        await session.send(verify_after(path))
        assert (await new.next(FeatureChunk)).start == 40


async def test_subscription_of_an_older_epoch_does_not_take_over() -> None:
    async with fake_drafts(2) as (target, session, new, late):
        await session.send(target_open(prompt=PROMPT, target_epoch=2))
        await session.next(AcceptedPath)
        await new.send(subscribe(target_epoch=2))
        await read_rows(new, "a", 0, 40)
        await late.send(subscribe(target_epoch=1))
        assert (await failure(late)).code == StatusCode.FAILED_PRECONDITION
        await session.send(target_open("b", prompt=PROMPT))
        assert await new.settle() == []
        assert target.worker.servicer.features.num_subscriptions == 1


async def test_subscription_of_an_older_draft_does_not_take_over() -> None:
    async with fake_drafts(2) as (target, session, new, late):
        path = await _open(session)
        await new.send(subscribe(draft_epoch=2))
        await read_rows(new, "a", 0, 40)
        await late.send(subscribe(draft_epoch=1))
        refusal = await failure(late)
        assert (refusal.code, refusal.draft_epoch) == (StatusCode.FAILED_PRECONDITION, 1)
        await session.send(verify_after(path))
        assert (await new.next(FeatureChunk)).start == 40
        # One that does not say its epoch may be newer: it takes over.
        await late.send(subscribe())
        assert (await late.next(FeatureChunk)).start == 0
        assert (await failure(new)).draft_epoch == 2


async def test_failure_of_an_older_draft_does_not_end_a_newer_ones_subscription() -> None:
    async with fake_drafts() as (target, session, features):
        path = await _open(session)
        await features.send(subscribe(draft_epoch=1, from_position=99))
        await features.send(subscribe(draft_epoch=2, from_position=40))
        assert (await failure(features)).draft_epoch == 1
        await session.send(verify_after(path))
        assert (await features.next(FeatureChunk)).start == 40


async def test_subscription_that_the_engine_refuses_fails_on_the_feature_stream() -> None:
    async with fake_drafts(engine=FakeTarget(has_features=False)) as (target, session, features):
        await _open(session)
        await features.send(subscribe())
        refused = await failure(features)
        assert (refused.code, refused.request_id) == (StatusCode.INVALID_ARGUMENT, "a")
        await session.next(TargetAdmitted)
        assert await session.settle() == [], "the orchestrator's request is well"
        assert target.worker.servicer.features.num_subscriptions == 0


async def test_unsubscribe_and_end_of_stream_stop_the_rows() -> None:
    async with fake_drafts() as (target, session, features):
        path = await _open(session, "a")
        await _open(session, "b")
        await features.send(subscribe("a"))
        await features.send(subscribe("b"))
        await read_rows(features, "a", 0, 40)
        await read_rows(features, "b", 0, 40)
        await features.send(FeatureUnsubscribe(request_id="a", target_epoch=1))
        await eventually(lambda: target.engine.requests["a"].next_feature is None)
        await session.send(verify_after(path))
        await session.next(AcceptedPath, "a")
        assert await features.settle() == []
        await features.close()
        await eventually(lambda: target.engine.requests["b"].next_feature is None)
        assert target.worker.servicer.features.num_subscriptions == 0
        assert set(target.engine.requests) == {"a", "b"}, "features are not the request"


async def test_subscription_outlives_a_closed_request_without_harm() -> None:
    async with fake_drafts() as (target, session, features):
        await _open(session)
        await features.send(subscribe())
        await read_rows(features, "a", 0, 40)
        await session.send(TargetClose(request_id="a", target_epoch=1))
        await eventually(lambda: target.engine.requests == {})
        await features.send(FeatureAck(request_id="a", target_epoch=1, position=40))
        await features.send(FeatureUnsubscribe(request_id="a", target_epoch=1))
        await eventually(lambda: target.worker.servicer.features.num_subscriptions == 0)
        assert target.engine.requests == {}


@pytest.mark.parametrize("field", ["command", "request_id", "from_position"])
async def test_malformed_command_is_answered_and_the_stream_goes_on(field: str) -> None:
    message = target_pb2.StreamFeaturesRequest()
    if field == "request_id":
        message.subscribe.target_epoch = 1
    elif field == "from_position":
        message.subscribe.request_id = "a"
        message.subscribe.from_position = -1
    async with fake_drafts() as (target, session, features):
        await _open(session)
        await features.call.write(message)
        refused = await failure(features)
        assert (refused.code, refused.field) == (StatusCode.INVALID_ARGUMENT, field)
        await features.send(subscribe())
        await read_rows(features, "a", 0, 40)


async def test_large_chunks_travel_as_the_engine_cut_them_and_not_all_at_once() -> None:
    width = 4096
    prompt = [7] * 200
    engine = FakeTarget(rows_per_chunk=64, width=width)
    async with fake_drafts(engine=engine) as (target, session, features):
        await session.send(target_open(prompt=prompt))
        await features.send(subscribe())
        data = await read_rows(features, "a", 0, 200)
        assert data == feature_rows(prompt, 0, 200, width)
        sizes = [
            len(chunk.handle.inline_data) for message in features.raw for chunk in message.chunks
        ]
        assert sizes == [MAX_CHUNK_BYTES] * 3 + [8 * 4 * width]
        assert max(message.ByteSize() for message in features.raw) < 2.1 * MAX_CHUNK_BYTES


async def test_a_draft_that_leaves_too_much_unread_subscribes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fake_target() as target, Peer(target.address) as peer, Peer(target.address) as draft:
        session, features = peer.target_session(), draft.feature_stream()
        await _open(session)
        monkeypatch.setattr("target_service.feature_streams.MAX_UNREAD_BYTES", 1)
        await features.send(subscribe())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await features.next(FeatureChunk)
        assert from_rpc_error(caught.value).reason == "SLOW_READER"
        monkeypatch.undo()
        assert target.worker.servicer.features.num_subscriptions == 0
        again = draft.feature_stream()
        await again.send(subscribe(draft_epoch=1))
        assert await read_rows(again, "a", 0, 40) == feature_rows(PROMPT, 0, 40)
