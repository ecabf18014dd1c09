"""Floods of connections, calls, watches and opens: refused by name, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coppice import AsyncClient
from coppice.v1 import generation_pb2 as pb
from coppice.v1 import generation_pb2_grpc as pb_grpc
from shared.messages import AcceptedPath, RequestFailure, TargetAdmitted
from shared.rpc.channel import open_channel
from shared.rpc.limits import ServerLimits
from shared.rpc.outbox import MAX_MESSAGES, Outbox
from shared.rpc.server import RpcServer
from shared.rpc.sessions import MAX_OPENS
from shared.rpc.status import from_rpc_error
from tests.contract.driver import Peer, target_open
from tests.contract.serving import freed, serving, write_model
from tests.fakes import eventually, fake_target, generate
from tests.scrape import free_ports, scrape

pytestmark = pytest.mark.asyncio

PROMPT = [3, 1, 4, 1, 5]
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def check(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    status: int = (await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)).status
    return status


async def first_answers(calls: list[Any]) -> Counter[str]:
    """Return how many calls were answered, and why the others were refused."""

    async def answer(call: Any) -> str:
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).reason
        return "answered"

    return Counter(await asyncio.gather(*map(answer, calls)))


@pytest.mark.parametrize("num_clients", [2, pytest.param(20, marks=pytest.mark.exhaustive)])
async def test_three_thousand_health_watches(model: Path, num_clients: int) -> None:
    """Half of what all addresses may have is for one of them; checks are answered all the time."""
    async with fake_target() as target, serving(model, [target]) as server:
        for address in (server.address, target.address):
            async with contextlib.AsyncExitStack() as stack:
                answers: Counter[str] = Counter()
                for _ in range(num_clients):  # of so many clients, so that gRPC itself refuses none
                    channel = await stack.enter_async_context(open_channel(address))
                    stub = health_pb2_grpc.HealthStub(channel)
                    request = health_pb2.HealthCheckRequest(service="")
                    watches = [stub.Watch(request) for _ in range(150)]
                    for call in watches:
                        stack.callback(call.cancel)
                    answers += await first_answers(watches)
                most = ServerLimits().watches // 2
                assert set(answers) == {"answered", "TOO_MANY_CALLS"}
                assert most - 1 <= answers["answered"] <= most  # the orchestrator watches as well
                async with open_channel(address) as channel:
                    assert await check(channel) == SERVING
        async with AsyncClient(server.address, max_retries=0) as client:
            done = await client.generate(token_ids=PROMPT, max_new_tokens=4)
        assert list(done.token_ids) == generate(PROMPT, 4)


async def test_too_many_calls_of_one_address_are_refused_and_come_again(model: Path) -> None:
    port = free_ports(1)
    async with (
        fake_target() as target,
        serving(model, [target], max_calls=8, metrics_port=port) as server,
        open_channel(server.address) as channel,
        AsyncClient(server.address, max_retries=0) as impatient,
        AsyncClient(server.address) as client,
    ):
        target.handle.pause()
        stub = pb_grpc.GenerationServiceStub(channel)
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
        calls = [stub.Generate(message) for _ in range(4)]
        await eventually(lambda: server.orchestrator.admission.num_requests == 4)
        with pytest.raises(Exception, match="of one address half as many") as caught:
            await impatient.generate(token_ids=PROMPT)
        assert caught.value.reason == "TOO_MANY_CALLS"  # type: ignore[attr-defined]
        assert caught.value.retry_after_s > 0  # type: ignore[attr-defined]
        seen = await asyncio.to_thread(scrape, f"http://127.0.0.1:{port}/metrics")
        assert seen.value("coppice_calls_refused_total", reason="TOO_MANY_CALLS") == 1
        assert seen.value("coppice_calls_refused_total") == 1
        assert await check(channel) == SERVING
        patient = asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=4))
        await asyncio.sleep(0.05)
        for call in calls:
            call.cancel()
        target.handle.resume()
        assert list((await patient).token_ids) == generate(PROMPT, 4)
        await freed(target)


async def test_reflection_has_a_limit_of_its_own() -> None:
    limits = ServerLimits()
    server = RpcServer(services=[], host="127.0.0.1", port=0, limits=limits)
    await server.start()
    async with open_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        most = limits.reflections // 2  # of one address
        calls = [stub.ServerReflectionInfo() for _ in range(most)]
        for call in calls:
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert await first_answers(calls) == {"answered": most}
        # Who writes to a call that is being refused may hear of the broken stream instead.
        late = [stub.ServerReflectionInfo() for _ in range(most)]
        assert await first_answers(late) == {"TOO_MANY_CALLS": most}
        for call in (*calls, *late):
            call.cancel()
    await server.stop(grace_s=0)


async def test_connections_are_limited_and_free_again() -> None:
    server = RpcServer(
        services=[], host="127.0.0.1", port=0, limits=ServerLimits(connections=5, streams=2)
    )
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel(server.address)) for _ in range(5)]
        for channel in channels:
            assert await check(channel) == SERVING
        async with open_channel(server.address) as late:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(late)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await channels[0].close()
        # Anew each time: the server hears of the end a moment later, and who is turned away in that
        # moment may wait for long before it dials again.
        deadline = asyncio.get_running_loop().time() + 60
        while not await is_served(server.address):
            assert asyncio.get_running_loop().time() < deadline, "no connection was free again"
    await server.stop(grace_s=0)


async def is_served(address: str) -> bool:
    async with open_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest()
            reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.status == SERVING)


async def test_a_flood_of_opens_is_refused_and_others_are_served() -> None:
    async with fake_target() as target, Peer(target.address) as flood, Peer(target.address) as peer:
        target.handle.pause()
        session = flood.target_session()
        num_opens = MAX_OPENS + 500
        for start in range(0, num_opens, 500):
            names = range(start, min(start + 500, num_opens))
            await session.send(*[target_open(f"{name}", max_new_tokens=1) for name in names])
        refused = await session.next(RequestFailure)
        assert (refused.code, refused.reason) == (8, "TOO_MANY_OPENS")
        assert target.worker.servicer.sessions.num_requests == MAX_OPENS
        target.handle.resume()
        other = peer.target_session()
        await other.send(target_open("mine"))
        await other.next(TargetAdmitted, "mine")
        await other.next(AcceptedPath, "mine")


async def test_whoever_does_not_take_answers_is_not_heard() -> None:
    """Until it does."""
    outbox = Outbox()
    outbox.put(range(MAX_MESSAGES))
    waiting = asyncio.create_task(outbox.wait_room())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    assert len(await outbox.take()) == MAX_MESSAGES
    await waiting
    outbox.put(range(MAX_MESSAGES))
    waiting = asyncio.create_task(outbox.wait_room())
    outbox.discard()
    await waiting
