"""Health, reflection and the end of a server, on both workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coppice.v1 import target_pb2
from shared.config import TargetConfig
from shared.errors import ConfigError
from shared.messages import AcceptedPath
from shared.rpc.channel import channel_options, open_channel, server_options
from shared.rpc.engine import EngineDiedError
from shared.rpc.server import RpcServer
from target_service.server import create_worker
from tests.contract.driver import Peer, target_open
from tests.fakes import FakeTarget, LocalEngine, eventually, fake_draft, fake_target

pytestmark = pytest.mark.asyncio

TARGET = "coppice.v1.TargetService"
DRAFT = "coppice.v1.DraftService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def check(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    status: int = reply.status
    return status


@contextlib.asynccontextmanager
async def watch(channel: grpc.aio.Channel, service: str) -> AsyncIterator[list[int]]:
    """Collect every health status that a service announces."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
    seen: list[int] = []

    async def read() -> None:
        async for reply in call:
            seen.append(reply.status)

    task = asyncio.create_task(read())
    try:
        yield seen
    finally:
        call.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_target_is_ready_only_once_its_engine_is() -> None:
    handle = LocalEngine(FakeTarget(), load_s=300)
    worker = create_worker(TargetConfig(host="127.0.0.1"), handle)
    starting = asyncio.create_task(worker.start())
    await eventually(lambda: worker.server.port != 0)
    async with open_channel(worker.address) as channel, watch(channel, TARGET) as seen:
        assert await check(channel, "") == SERVING
        assert await check(channel, TARGET) == NOT_SERVING
        handle.finish_loading()
        await starting
        assert await check(channel, TARGET) == SERVING
        await eventually(lambda: seen == [NOT_SERVING, SERVING])
    await worker.close()


async def test_unknown_service_is_not_found() -> None:
    async with fake_target() as target, open_channel(target.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(channel, DRAFT)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_worker_whose_engine_hangs_ends() -> None:
    async with fake_target(stall_timeout_s=0.3) as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open("a"))
        await session.next(AcceptedPath)
        await asyncio.sleep(0.6)
        assert not target.running.done(), "idle is not hung"
        target.handle.pause()
        await session.send(target_open("b"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.next(AcceptedPath, "b")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(EngineDiedError, match=r"no progress for \d\.\d s"):
            await target.running


async def test_an_idle_engine_that_hangs_is_found() -> None:
    async with fake_target(stall_timeout_s=0.3) as target:
        target.handle.pause()
        with pytest.raises(EngineDiedError, match=r"no progress for \d\.\d s"):
            await asyncio.wait_for(target.running, 60)


async def test_draining_worker_is_not_ready() -> None:
    async with (
        fake_target(drain_timeout_s=300) as target,
        Peer(target.address) as peer,
        watch(peer.channel, TARGET) as seen,
    ):
        session = peer.target_session()
        await session.send(target_open())
        await session.next(AcceptedPath)
        target.worker.server.request_stop()
        await eventually(lambda: seen == [SERVING, NOT_SERVING])
        assert await check(peer.channel, "") == SERVING
        await session.close()
        await asyncio.wait_for(target.running, 60)


async def test_drain_ends_at_its_budget() -> None:
    async with fake_target(drain_timeout_s=0.2) as target, Peer(target.address) as peer:
        session = peer.target_session()
        await session.send(target_open())
        await session.next(AcceptedPath)
        target.worker.server.request_stop()
        await asyncio.wait_for(target.running, 60)
        with pytest.raises((grpc.aio.AioRpcError, EOFError)):
            await session.next(AcceptedPath)


@pytest.mark.parametrize(("start", "name"), [(fake_target, TARGET), (fake_draft, DRAFT)])
async def test_reflection_lists_and_describes_the_services(
    start: Callable[..., Any], name: str
) -> None:
    async with start() as worker, open_channel(worker.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = await call.read()
        names = {service.name for service in listed.list_services_response.service}
        assert names == {
            name,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        described = await call.read()
        assert described.file_descriptor_response.file_descriptor_proto
        await call.done_writing()


async def test_two_servers_cannot_share_a_port() -> None:
    async with fake_target() as target:
        other = RpcServer(services=[], host="127.0.0.1", port=target.worker.server.port)
        with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1"):
            await other.start()
        await other.stop(grace_s=0)


async def test_public_message_limit_is_the_servers() -> None:
    server = RpcServer(services=[], host="127.0.0.1", port=0, max_message_bytes=64 * 1024)
    await server.start()
    async with open_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(channel, "x" * 100_000)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await check(channel, "") == SERVING
    await server.stop(grace_s=0)


async def test_options_notice_a_silent_peer() -> None:
    """`keepalive_timeout_ms` alone does nothing in C-core."""
    client, server = dict(channel_options()), dict(server_options())
    assert client["grpc.http2.ping_timeout_ms"] <= 5000
    assert (
        client["grpc.keepalive_time_ms"] >= server["grpc.http2.min_ping_interval_without_data_ms"]
    )
    assert client["grpc.enable_retries"] == 0
    assert server["grpc.so_reuseport"] == 0


async def test_unknown_method_is_unimplemented() -> None:
    async with fake_draft() as draft, Peer(draft.address) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await peer.target.GetInfo(target_pb2.TargetServiceGetInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
