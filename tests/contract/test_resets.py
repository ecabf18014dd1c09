"""Connections to live workers that are reset: whoever streams is served, whatever died beside."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import grpc.aio
import pytest

from coppice import AsyncClient
from coppice.v1 import target_pb2, target_pb2_grpc
from shared.rpc.protocol import METADATA
from shared.rpc.status import from_rpc_error
from tests.contract.serving import freed, serving, write_model
from tests.e2e.tcp_links import tcp_links
from tests.fakes import FakeTarget, FakeWorker, eventually, fake_target, generate

pytestmark = pytest.mark.asyncio

PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint directory with a tokenizer of the fakes' vocabulary."""
    return write_model(tmp_path_factory.mktemp("model"))


def names_of(workers: list[FakeWorker]) -> list[int]:
    """Return which workers hold a request."""
    return [i for i, worker in enumerate(workers) if worker.worker.num_requests]


async def test_resets_of_live_targets_are_no_deaths(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first round, again and again; then while it streams."""
    monkeypatch.setattr("orchestrator.suspicion.MOMENT_S", 0.0)
    async with contextlib.AsyncExitStack() as stack:
        links = stack.enter_context(tcp_links())
        targets = [
            await stack.enter_async_context(fake_target(FakeTarget(incarnation=name), step_s=0.01))
            for name in ("a", "b")
        ]
        to_targets = [links.to(target.address) for target in targets]
        addresses = [link.address for link in to_targets]
        server = await stack.enter_async_context(
            serving(model, addresses, resolve_interval_s=60.0, step_timeout_s=60.0)
        )
        client = await stack.enter_async_context(AsyncClient(server.address, max_retries=0))
        for target in targets:
            target.handle.pause()
        events = client.stream(token_ids=PROMPT, max_new_tokens=NUM_TOKENS)
        token_ids: list[int] = []

        async def read() -> int:
            async for event in events:
                token_ids.extend(getattr(event, "token_ids", ()))
            return event.retries

        reading = asyncio.create_task(read())
        num_resets = 0
        while num_resets < 2:
            await server.sees(targets=2, drafts=0)
            await eventually(lambda: len(names_of(targets)) == 1, what="the request on a target")
            (where,) = names_of(targets)
            to_targets[where].reset()
            num_resets += 1
            await eventually(lambda where=where: names_of(targets) not in ([], [where]))
        for target in targets:
            target.handle.resume()
        for num_tokens in range(40, 120, 40):
            await eventually(lambda num_tokens=num_tokens: len(token_ids) >= num_tokens)
            # The one that it left has heard of that.
            await eventually(lambda: len(names_of(targets)) == 1)
            (where,) = names_of(targets)
            to_targets[where].reset()
            num_resets += 1
        assert await reading >= num_resets
        assert token_ids == generate(PROMPT, NUM_TOKENS)
        await freed(*targets)


async def test_a_worker_whose_engine_ends_says_so() -> None:
    """Nobody takes that for a connection that broke, nor the worker for what it was."""
    async with fake_target() as target, grpc.aio.insecure_channel(target.address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        call = stub.Session(metadata=METADATA)
        await call.read()  # its load
        target.handle.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                await call.read()
        error = from_rpc_error(caught.value)
        assert error.reason == "ENGINE_ENDED"
        assert "the fake engine was killed" in error.message
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest(), metadata=METADATA)
