"""TargetService.Session and GetInfo over real gRPC, with a fake engine behind them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from coppice.v1 import target_pb2
from shared.config import TargetConfig
from shared.errors import StatusCode
from shared.messages import (
    AcceptedPath,
    FinishReason,
    RequestFailure,
    RequestRetracted,
    TargetAdmitted,
    TargetClose,
    from_proto,
)
from shared.messages.batches import pack_target_request
from shared.rpc.status import from_rpc_error
from target_service.server import create_worker
from tests.contract.driver import Peer, failure, target_open, tree_after, verify_after
from tests.fakes import FakeTarget, LocalEngine, eventually, fake_target, generate, next_token

pytestmark = pytest.mark.asyncio

PROMPT = (1, 2, 3, 4, 5)


async def test_open_is_admitted_and_prefilled() -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open(prompt=PROMPT))
        assert (await session.next(TargetAdmitted)).target_epoch == 1
        path = await session.next(AcceptedPath)
        assert path == AcceptedPath(
            request_id="a",
            target_epoch=1,
            round_idx=0,
            seq_len=len(PROMPT),
            accept_index=(0,),
            token_ids=(next_token(PROMPT),),
            num_accepted_drafts=0,
            num_draft_tokens=1,
        )
        assert session.load.num_running == 1


async def test_tree_round_commits_the_path_that_the_target_agrees_with() -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open(prompt=PROMPT))
        first = await session.next(AcceptedPath)
        a, b, c = generate((*PROMPT, *first.token_ids), 3)
        wrong = (a + 1) % 512
        tree = tree_after(first, (wrong, a, wrong, b), (0, 0, 2, 2))
        await session.send(verify_after(first, tree))
        path = await session.next(AcceptedPath)
        assert path.accept_index == (0, 2, 4)
        assert path.token_ids == (a, b, c)
        assert (path.num_accepted_drafts, path.num_draft_tokens) == (2, 5)
        assert path.seq_len == first.seq_len + 3


async def test_repeated_round_gets_the_same_bytes() -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open())
        order = verify_after(await session.next(AcceptedPath))
        for _ in range(3):
            await session.send(order)
            await session.next(AcceptedPath)
        answers = [
            response.path_batch.SerializeToString(deterministic=True)
            for response in session.raw
            if list(response.path_batch.round_idx) == [1]
        ]
        assert len(answers) == 3 and len(set(answers)) == 1
        assert len(target.engine.requests["a"].tokens) == 5 + 2, "committed once"


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"seq_len": 4}, StatusCode.FAILED_PRECONDITION, "seq_len"),
        ({"round_idx": 3}, StatusCode.FAILED_PRECONDITION, "round_idx"),
        ({"root_token_id": 0}, StatusCode.FAILED_PRECONDITION, "root_token_id"),
        ({"target_epoch": 2}, StatusCode.FAILED_PRECONDITION, "target_epoch"),
        ({"request_id": "other"}, StatusCode.NOT_FOUND, "request_id"),
        ({"seq_len": -1}, StatusCode.INVALID_ARGUMENT, "seq_len"),
        ({"request_id": ""}, StatusCode.INVALID_ARGUMENT, "request_id"),
    ],
)
async def test_bad_round_fails_alone(
    changes: dict[str, object], code: StatusCode, field: str
) -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open())
        path = await session.next(AcceptedPath)
        await session.send(verify_after(path, **changes))
        refused = await failure(session)
        assert (refused.code, refused.field) == (code, field)
        await session.send(verify_after(path))
        assert (await session.next(AcceptedPath)).round_idx == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": (7, 8), "parent_index": (0, 2)}, "tree.parent_index"),
        ({"token_ids": (7,), "parent_index": (-1,)}, "tree.parent_index"),
        ({"token_ids": (7, 8), "parent_index": (0,)}, "tree.parent_index"),
        ({"token_ids": (512,), "parent_index": (0,)}, "tree.token_ids"),
        ({"token_ids": range(64), "parent_index": range(64)}, "tree.token_ids"),
        ({"root": 0, "token_ids": (), "parent_index": ()}, "tree.token_ids"),
        (
            {"token_ids": (7,), "parent_index": (0,), "scores": (0.0,)},
            "tree.scores.cumulative_logprobs",
        ),
    ],
)
async def test_malformed_tree_changes_nothing(changes: dict[str, Any], field: str) -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open())
        path = await session.next(AcceptedPath)
        assert path.token_ids[-1] != 0
        await session.send(verify_after(path, tree_after(path, **changes)))
        refused = await failure(session)
        assert (refused.code, refused.reason) == (StatusCode.INVALID_ARGUMENT, "INVALID_TREE")
        assert (refused.field, refused.round_idx) == (field, 1)
        await session.send(verify_after(path))
        assert (await session.next(AcceptedPath)).num_draft_tokens == 1


async def test_bad_open_fails_alone() -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        batch = pack_target_request([target_open("ok"), target_open("bad"), target_open("big")])
        batch.opens[1].sampling.temperature = float("nan")
        batch.opens[2].token_ids.append(512)
        batch.opens[2].num_prompt_tokens += 1
        await session.call.write(batch)
        assert (await failure(session, "bad")).field == "sampling.temperature"
        assert (await failure(session, "big")).field == "token_ids"
        assert (await session.next(AcceptedPath)).request_id == "ok"


async def test_prompt_longer_than_the_context_is_refused() -> None:
    async with (
        fake_target(FakeTarget(max_context_len=8)) as target,
        Peer(target.address) as peer,
    ):
        session = peer.target_session()
        await session.send(target_open(prompt=range(1, 9)))
        refused = await failure(session)
        assert (refused.code, refused.reason, refused.field) == (
            StatusCode.INVALID_ARGUMENT,
            "PROMPT_TOO_LONG",
            "token_ids",
        )


async def test_open_of_an_epoch_that_is_open_is_stale() -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open(target_epoch=2))
        path = await session.next(AcceptedPath)
        for epoch in (2, 1):
            await session.send(target_open(target_epoch=epoch))
            assert (await failure(session)).code == StatusCode.FAILED_PRECONDITION
        await session.send(verify_after(path))
        assert (await session.next(AcceptedPath)).target_epoch == 2


async def test_newer_epoch_rebuilds_the_request() -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open())
        first = await session.next(AcceptedPath)
        await session.send(target_open(prompt=(*PROMPT, *first.token_ids), target_epoch=2))
        path = await session.next(AcceptedPath)
        assert (path.target_epoch, path.round_idx, path.seq_len) == (2, 0, 6)
        assert path.token_ids[0] == generate(PROMPT, 2)[1]


async def test_a_newer_epoch_that_the_engine_refuses_leaves_nothing_of_the_older_one() -> None:
    """Nobody would close it: its stream gave it away."""
    async with (
        fake_target() as target,
        Peer(target.address) as first,
        Peer(target.address) as second,
    ):
        old, new = first.target_session(), second.target_session()
        await old.send(target_open(target_epoch=1))
        await old.next(AcceptedPath)
        await new.send(target_open(prompt=(512,), target_epoch=2))  # no token of this model
        assert (await failure(new)).field == "token_ids"
        await eventually(lambda: target.engine.requests == {})
        assert target.worker.servicer.sessions.num_requests == 0


async def test_close_frees_the_request_and_only_that() -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open("a"), target_open("b"))
        path = await session.next(AcceptedPath, "b")
        await session.send(TargetClose(request_id="a", target_epoch=1))
        await eventually(lambda: set(target.engine.requests) == {"b"})
        await session.send(verify_after(path))
        assert (await session.next(AcceptedPath, "b")).round_idx == 1


async def test_close_of_an_older_epoch_is_ignored() -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open(target_epoch=2))
        path = await session.next(AcceptedPath)
        await session.send(TargetClose(request_id="a", target_epoch=1))
        await session.send(verify_after(path))
        assert (await session.next(AcceptedPath)).round_idx == 1


@pytest.mark.parametrize("how", ["half_close", "cancel", "channel"])
async def test_end_of_the_stream_frees_its_requests(how: str) -> None:
    async with (
        fake_target() as target,
        Peer(target.address) as leaving,
        Peer(target.address) as staying,
    ):
        gone, kept = leaving.target_session(), staying.target_session()
        await gone.send(target_open("a"), target_open("b"))
        await kept.send(target_open("c"))
        await gone.next(AcceptedPath, "b")
        path = await kept.next(AcceptedPath)
        if how == "half_close":
            await gone.close()
        elif how == "cancel":
            gone.call.cancel()
        else:
            await leaving.channel.close()
        await eventually(lambda: set(target.engine.requests) == {"c"})
        assert target.worker.servicer.sessions.num_requests == 1
        await kept.send(verify_after(path))
        assert (await kept.next(AcceptedPath)).request_id == "c"


async def test_request_that_moved_to_a_newer_stream_survives_the_older_one() -> None:
    async with (
        fake_target() as target,
        Peer(target.address) as first,
        Peer(target.address) as second,
    ):
        old, new = first.target_session(), second.target_session()
        await old.send(target_open(target_epoch=1))
        await old.next(AcceptedPath)
        await new.send(target_open(target_epoch=2))
        path = await new.next(AcceptedPath)
        await old.close()
        await new.send(verify_after(path))
        assert (await new.next(AcceptedPath)).round_idx == 1
        assert "a" in target.engine.requests


async def test_requests_of_other_streams_are_not_found() -> None:
    async with (
        fake_target() as target,
        Peer(target.address) as first,
        Peer(target.address) as second,
    ):
        owner, stranger = first.target_session(), second.target_session()
        await owner.send(target_open())
        path = await owner.next(AcceptedPath)
        await stranger.send(TargetClose(request_id="a", target_epoch=1))
        await stranger.send(verify_after(path))
        refused = await failure(stranger)
        assert (refused.code, refused.reason) == (StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
        await owner.send(verify_after(path))
        assert (await owner.next(AcceptedPath)).round_idx == 1
        assert await stranger.settle() == []


async def test_finished_request_holds_nothing() -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open(max_new_tokens=1))
        path = await session.next(AcceptedPath)
        assert path.finish_reason is FinishReason.LENGTH
        assert target.engine.requests == {}
        assert target.worker.servicer.sessions.num_requests == 0
        await session.send(TargetClose(request_id="a", target_epoch=1))
        await session.send(verify_after(path))
        assert (await failure(session)).code == StatusCode.NOT_FOUND


async def test_retraction_reaches_the_orchestrator() -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open())
        await session.next(AcceptedPath)
        target.engine.retract("a")
        target.handle.wake()
        assert await session.next(RequestRetracted) == RequestRetracted(
            request_id="a", target_epoch=1
        )
        await session.send(target_open(target_epoch=2))
        assert (await session.next(AcceptedPath)).target_epoch == 2


async def test_answers_of_one_step_share_a_message() -> None:
    async with fake_target(step_s=0.02) as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(*(target_open(f"r{i}") for i in range(32)))
        for i in range(32):
            await session.next(AcceptedPath, f"r{i}")
        answers = [r.path_batch for r in session.raw if r.HasField("path_batch")]
        assert [len(columns.request_ids) for columns in answers] == [32]
        assert not any(r.accepted_paths for r in session.raw)


async def test_load_flows_while_the_stream_has_nothing_else() -> None:
    async with (
        fake_target(step_s=0.1) as target,
        Peer(target.address) as busy_peer,
        Peer(target.address) as idle_peer,
    ):
        idle = idle_peer.target_session()
        await idle.call.write(pack_target_request([]))
        await idle.until(lambda: idle.load is not None)
        assert idle.load.num_running == 0
        busy = busy_peer.target_session()
        await busy.send(target_open())
        path = await busy.next(AcceptedPath)
        for _ in range(5):
            await busy.send(verify_after(path))
            path = await busy.next(AcceptedPath)
        await idle.until(lambda: idle.load.num_running == 1 and idle.load.num_steps >= 2)
        assert await idle.settle() == []


async def test_message_over_the_limit_ends_only_its_stream() -> None:
    async with (
        fake_target() as target,
        Peer(target.address) as first,
        Peer(target.address) as second,
    ):
        large, other = first.target_session(), second.target_session()
        await other.send(target_open("b"))
        path = await other.next(AcceptedPath)
        # The client's own limit is the same: lift it, as a foreign client would.
        channel = grpc.aio.insecure_channel(
            target.address, options=[("grpc.max_send_message_length", -1)]
        )
        async with channel:
            call = channel.stream_stream(
                "/coppice.v1.TargetService/Session",
                request_serializer=bytes,
                response_deserializer=target_pb2.TargetServiceSessionResponse.FromString,
            )()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.write(bytes(100 * 1024 * 1024))
                while await call.read() is not grpc.aio.EOF:
                    pass
                raise AssertionError("the stream ended without an error")
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
        await other.send(verify_after(path))
        assert (await other.next(AcceptedPath)).round_idx == 1
        await large.send(target_open("a"))
        assert (await large.next(AcceptedPath)).request_id == "a"


async def test_get_info_says_identity_and_load() -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open())
        await session.next(AcceptedPath)
        reply = await peer.target.GetInfo(target_pb2.TargetServiceGetInfoRequest())
        info = from_proto(reply.info)
        assert info.kind == "target" and info.incarnation == "fake-target"
        assert info.features == target.engine.info.features
        assert info.load.num_running == 1


async def test_everything_is_unavailable_while_the_model_loads() -> None:
    handle = LocalEngine(FakeTarget(), load_s=30)
    worker = create_worker(TargetConfig(host="127.0.0.1"), handle)
    starting = asyncio.create_task(worker.start())
    await eventually(lambda: worker.server.port != 0)
    async with Peer(worker.address) as peer:
        calls = [peer.target.Session(), peer.target.StreamFeatures()]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert from_rpc_error(caught.value).reason == "LOADING"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.target.GetInfo(target_pb2.TargetServiceGetInfoRequest())
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (StatusCode.UNAVAILABLE, "LOADING")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_draining_refuses_new_requests_and_waits_for_the_others() -> None:
    async with fake_target(drain_timeout_s=300) as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open("a"))
        path = await session.next(AcceptedPath)
        target.worker.server.request_stop()
        await eventually(lambda: target.worker.servicer.sessions.is_draining)
        await session.send(target_open("b"))
        refused = await failure(session, "b")
        assert (refused.code, refused.reason) == (StatusCode.UNAVAILABLE, "DRAINING")
        await session.send(verify_after(path))
        assert (await session.next(AcceptedPath)).round_idx == 1
        assert not target.running.done()
        await session.send(TargetClose(request_id="a", target_epoch=1))
        await asyncio.wait_for(target.running, 60)


async def test_dead_engine_ends_the_worker_and_its_streams() -> None:
    async with fake_target() as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open())
        await session.next(AcceptedPath)
        target.handle.kill()
        with pytest.raises(RuntimeError, match="the fake engine was killed"):
            await asyncio.wait_for(asyncio.shield(target.running), 60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.next(RequestFailure)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
