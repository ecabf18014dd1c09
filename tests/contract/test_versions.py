"""Processes of two releases: what works together does, and what does not is refused by name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import message_factory

from coppice import AsyncClient
from coppice.v1 import admin_pb2, admin_pb2_grpc
from shared.rpc import identity
from shared.rpc.channel import open_channel
from shared.rpc.protocol import PROTOCOL_VERSION
from shared.rpc.status import from_rpc_error
from tests.contract.serving import freed, serving, write_model
from tests.fakes import FakeDraft, FakeTarget, eventually, fake_draft, fake_target, generate
from tests.unit.test_protocol import RELEASES, pool_of

pytestmark = pytest.mark.asyncio

PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def saying(version: int) -> Any:
    """Let workers that start in the block say that they are of another version; 0: say nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "PROTOCOL_VERSION", version)
        yield


async def complete(address: str) -> list[int]:
    async with AsyncClient(address) as client:
        completion = await client.generate(token_ids=PROMPT, max_new_tokens=NUM_TOKENS)
        return list(completion.token_ids)


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
async def test_workers_of_the_release_before_and_after_serve(model: Path, version: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        with saying(version):
            target = await stack.enter_async_context(fake_target(FakeTarget()))
            draft = await stack.enter_async_context(fake_draft(FakeDraft()))
        server = await stack.enter_async_context(serving(model, [target], [draft]))
        assert server.orchestrator.pool.can_speculate
        assert await complete(server.address) == generate(PROMPT, NUM_TOKENS)
        await freed(target, draft)


async def test_workers_of_two_releases_away_are_refused_by_name(model: Path) -> None:
    """What is not refused serves on."""
    async with contextlib.AsyncExitStack() as stack:
        target = await stack.enter_async_context(fake_target(FakeTarget(incarnation="t")))
        with saying(PROTOCOL_VERSION + 2):
            other = await stack.enter_async_context(fake_target(FakeTarget(incarnation="u")))
            draft = await stack.enter_async_context(fake_draft(FakeDraft(incarnation="d")))
        server = await stack.enter_async_context(
            serving(model, [target, other], [draft], waits=False)
        )
        await server.sees(targets=1, drafts=0)
        pool = server.orchestrator.pool
        await eventually(lambda: len(pool.refused) == 2)
        assert await complete(server.address) == generate(PROMPT, NUM_TOKENS)
        channel = await stack.enter_async_context(
            open_channel(f"127.0.0.1:{server.orchestrator.admin_port}")
        )
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        reply = await admin.ListWorkers(admin_pb2.ListWorkersRequest())
        problems = {worker.address: worker.problem for worker in reply.workers}
        assert problems.pop(target.address) == ""
        for problem in problems.values():
            assert f"speaks protocol version {PROTOCOL_VERSION + 2}" in problem


async def test_a_worker_refuses_who_calls_it_from_two_releases_away() -> None:
    async with fake_target() as target, open_channel(target.address) as channel:
        session = channel.stream_stream("/coppice.v1.TargetService/Session")
        version = str(PROTOCOL_VERSION + 2)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in session(iter(()), metadata=[("coppice-protocol", version)]):
                pass
        error = from_rpc_error(refused.value)
        assert error.reason == "PROTOCOL_MISMATCH"
        assert version in error.message


@pytest.mark.parametrize("release", RELEASES[-1:], ids=lambda path: path.stem)
async def test_the_last_releases_stubs_are_served(model: Path, release: Path) -> None:
    """A client and an orchestrator that were built from its protos, and say no version."""
    pool = pool_of(release)

    def message(name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"coppice.v1.{name}"))

    async with (
        fake_target() as target,
        serving(model, [target]) as server,
        open_channel(server.address) as channel,
        open_channel(target.address) as internal,
    ):
        request = message("GenerateRequest")()
        request.token_ids.ids.extend(PROMPT)
        request.stopping.max_new_tokens = NUM_TOKENS
        call = channel.unary_stream(
            "/coppice.v1.GenerationService/Generate",
            request_serializer=lambda sent: sent.SerializeToString(),
            response_deserializer=message("GenerateResponse").FromString,
        )
        token_ids = [i async for response in call(request) for i in response.delta.token_ids]
        assert token_ids == generate(PROMPT, NUM_TOKENS)

        opened = message("TargetServiceSessionRequest")()
        target_open = opened.opens.add()
        target_open.request_id, target_open.target_epoch = "old", 1
        target_open.token_ids.extend(PROMPT)
        target_open.num_prompt_tokens = len(PROMPT)
        target_open.stopping.max_new_tokens = 1
        session = internal.stream_stream(
            "/coppice.v1.TargetService/Session",
            request_serializer=lambda sent: sent.SerializeToString(),
            response_deserializer=message("TargetServiceSessionResponse").FromString,
        )()
        await session.write(opened)
        paths: list[Any] = []
        while not paths:
            paths += (await session.read()).accepted_paths
        assert list(paths[0].token_ids) == generate(PROMPT, 1)
        session.cancel()
