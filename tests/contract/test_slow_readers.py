"""Clients that do not read: what they hold is free for others, and they can go on later."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

import shared.rpc.channel
from coppice import AsyncClient, TokenDelta
from coppice.v1 import generation_pb2 as pb
from coppice.v1 import generation_pb2_grpc as pb_grpc
from shared.messages.batches import unpack_events
from shared.rpc.channel import Options, channel_options
from shared.rpc.status import from_rpc_error
from tests.contract.serving import Serving, freed, serving, write_model
from tests.fakes import FakeTarget, FakeWorker, eventually, fake_target, generate

pytestmark = pytest.mark.asyncio

PROMPT = [3, 1, 4, 1, 5]
NUM_PLACES = 8
# With log-probabilities more than windows that do not grow, and than may wait, together.
NUM_LONG = 1500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def small_windows(**limits: int) -> Options:
    """Return the options of a channel whose windows do not grow, however fast its server is."""
    return [*channel_options(**limits), ("grpc.http2.bdp_probe", 0)]


@contextlib.asynccontextmanager
async def unread(
    address: str, count: int, num_tokens: int, **fields: Any
) -> AsyncIterator[list[Any]]:
    """Open streams whose client reads nothing of them; fields are more of their request."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        stopping=pb.StoppingCriteria(max_new_tokens=num_tokens),
        output=pb.OutputOptions(logprobs=True, top_logprobs=20),
        **fields,
    )
    async with contextlib.AsyncExitStack() as stack:
        calls = []
        for _ in range(count):
            channel = grpc.aio.insecure_channel(address, options=small_windows())
            await stack.enter_async_context(channel)
            call = pb_grpc.GenerationServiceStub(channel).Generate(request)
            stack.callback(call.cancel)
            calls.append(call)
        yield calls


async def read_on(call: Any) -> tuple[list[int], grpc.aio.AioRpcError | None]:
    """Read what is left of a stream; return its tokens and how it ended."""
    tokens: list[int] = []
    try:
        async for response in call:
            for event in unpack_events(response):
                if isinstance(event, TokenDelta):
                    tokens += event.token_ids
    except grpc.aio.AioRpcError as error:
        return tokens, error
    return tokens, None


@contextlib.asynccontextmanager
async def small_server(model: Path, **fields: Any) -> AsyncIterator[tuple[Serving, FakeWorker]]:
    async with (
        fake_target() as target,
        serving(model, [target], max_num_requests=NUM_PLACES, **fields) as server,
    ):
        yield server, target
        await freed(target)


@contextlib.asynccontextmanager
async def all_placed(server: Serving, target: FakeWorker) -> AsyncIterator[list[Any]]:
    """Open streams that nobody reads on all places; none has output before all are there."""
    target.handle.pause()
    async with unread(server.address, NUM_PLACES, NUM_LONG) as calls:
        admission = server.orchestrator.admission
        await eventually(lambda: admission.num_requests == NUM_PLACES)
        target.handle.resume()
        yield calls


async def test_what_is_generated_holds_no_place(model: Path) -> None:
    """Eight clients that never read, on eight places: others are served at once."""
    async with (
        small_server(model) as (server, _),
        unread(server.address, NUM_PLACES, 200) as calls,
        AsyncClient(server.address, max_retries=0) as client,
    ):
        # Their text takes several windows, and less than may wait for them.
        await asyncio.gather(*[call.initial_metadata() for call in calls])
        admission = server.orchestrator.admission
        await eventually(lambda: admission.num_requests == 0)
        done = await client.generate(token_ids=PROMPT, max_new_tokens=8)
        assert list(done.token_ids) == generate(PROMPT, 8)
        for call in calls:
            assert await read_on(call) == (generate(PROMPT, 200), None)


@pytest.mark.parametrize("read_timeout_s", [1.0, pytest.param(60.0, marks=pytest.mark.exhaustive)])
async def test_who_reads_nothing_makes_room_for_others(
    model: Path, read_timeout_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Paced, then ended: the rest of what was sent comes with a status that says to resume."""
    caplog.set_level(logging.WARNING)
    async with (
        small_server(model, read_timeout_s=read_timeout_s) as (server, target),
        all_placed(server, target) as calls,
        AsyncClient(server.address) as client,
    ):
        done = await client.generate(token_ids=PROMPT, max_new_tokens=8, timeout_s=60)
        assert list(done.token_ids) == generate(PROMPT, 8)
        await eventually(lambda: server.orchestrator.admission.num_requests == 0, timeout_s=90)
        tokens, error = await read_on(calls[0])
        assert error is not None and error.code() is grpc.StatusCode.UNAVAILABLE
        assert from_rpc_error(error).reason == "SLOW_READER"
        assert tokens == generate(PROMPT, NUM_LONG)[: len(tokens)] and tokens
    records = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not records, "nobody has done anything wrong"


async def test_a_client_that_falls_asleep_resumes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.rpc.channel, "channel_options", small_windows)
    async with (
        small_server(model, read_timeout_s=0.5) as (server, _),
        AsyncClient(server.address) as client,
    ):
        admission = server.orchestrator.admission
        tokens: list[int] = []
        admission = server.orchestrator.admission
        async for event in client.stream(
            token_ids=PROMPT, max_new_tokens=NUM_LONG, logprobs=True, top_logprobs=20
        ):
            if isinstance(event, TokenDelta):
                if not tokens:
                    await eventually(lambda: admission.num_requests == 0)
                tokens += event.token_ids
        assert tokens == generate(PROMPT, NUM_LONG)


async def test_streams_that_hold_too_much_together_end(model: Path) -> None:
    """Long before any of them has not read for too long."""
    async with (
        small_server(model, max_unread_mb=1) as (server, target),
        all_placed(server, target) as calls,
    ):
        admission = server.orchestrator.admission
        await eventually(lambda: admission.num_requests <= 1)
        ends = [await read_on(call) for call in calls]
        reasons = [from_rpc_error(error).reason for _, error in ends if error is not None]
        assert reasons and set(reasons) == {"SLOW_READER"}


async def test_a_stream_ends_when_it_is_old_and_its_client_goes_on(model: Path) -> None:
    async with (
        fake_target(FakeTarget(max_context_len=8192), step_s=0.002) as target,
        serving(model, [target], stream_lifetime_s=1.0) as server,
        AsyncClient(server.address) as client,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = pb_grpc.GenerationServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT)))
        resumed, (tokens, error) = await asyncio.gather(
            client.generate(token_ids=PROMPT, max_new_tokens=1000), read_on(call)
        )
        assert error is not None and from_rpc_error(error).reason == "STREAM_TOO_OLD"
        assert tokens == generate(PROMPT, len(tokens))
        assert list(resumed.token_ids) == generate(PROMPT, 1000)
        await freed(target)


async def test_a_write_that_is_cancelled_is_no_error(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        small_server(model) as (server, target),
        all_placed(server, target) as calls,
    ):
        await asyncio.sleep(0.3)  # until the windows are full
        for call in calls:
            call.cancel()
        await eventually(lambda: server.orchestrator.admission.num_requests == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    ends = [record for record in caplog.records if "cancelled after" in record.getMessage()]
    assert len(ends) == NUM_PLACES
