"""AdminService between an orchestrator and real fronts: drains, aborts, figures, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from rich.console import Console

from coppice import AsyncClient, TokenDelta
from coppice.cli.admin_tables import Sample, frame, workers_table
from coppice.v1 import admin_pb2 as pb
from coppice.v1 import admin_pb2_grpc as pb_grpc
from orchestrator.admin import shown_info
from shared.errors import AbortedError, UnavailableError
from shared.messages import TargetOpen, WorkerLoad
from shared.rpc.channel import open_channel
from shared.rpc.status import from_rpc_error
from tests.contract.serving import Serving, freed, serving, write_model
from tests.contract.test_slow_readers import NUM_LONG, read_on, unread
from tests.fakes import WIDTH, FakeDraft, FakeTarget, eventually, fake_draft, fake_target, generate
from tests.scrape import free_ports

pytestmark = pytest.mark.asyncio

PROMPT = [3, 1, 4, 1, 5]
LONG = 400
STEP_S = 0.003


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def admin_of(server: Serving) -> AsyncIterator[pb_grpc.AdminServiceStub]:
    async with open_channel(f"127.0.0.1:{server.orchestrator.admin_port}") as channel:
        yield pb_grpc.AdminServiceStub(channel)


def target(name: str) -> contextlib.AbstractAsyncContextManager[object]:
    return fake_target(FakeTarget(incarnation=name), step_s=STEP_S, drain_timeout_s=300.0)


async def state_of(admin: pb_grpc.AdminServiceStub, address: str) -> str:
    reply = await admin.ListWorkers(pb.ListWorkersRequest())
    (status,) = [worker for worker in reply.workers if worker.address == address]
    return pb.WorkerState.Name(status.state).removeprefix("WORKER_STATE_")


async def becomes(admin: pb_grpc.AdminServiceStub, address: str, state: str) -> None:
    async with asyncio.timeout(60):
        while await state_of(admin, address) != state:
            await asyncio.sleep(0.01)


async def stream(client: AsyncClient, request_id: str = "") -> list[int]:
    token_ids: list[int] = []
    async for event in client.stream(
        token_ids=PROMPT, max_new_tokens=LONG, **({"request_id": request_id} if request_id else {})
    ):
        if isinstance(event, TokenDelta):
            assert event.token_offset == len(token_ids)
            token_ids += event.token_ids
    return token_ids


async def test_operators_see_no_names_by_which_drafts_reach_a_target() -> None:
    names = {"peer_address": "10.0.0.5:7000/token", "peer_socket": "socket", "feature_ring": "ring"}
    info = dataclasses.replace(FakeTarget().info, **names)
    worker: Any = SimpleNamespace(info=info, load=WorkerLoad(num_steps=3))
    shown = shown_info(worker)
    assert all(getattr(shown, name) == "" for name in names)
    assert (shown.load.num_steps, shown.incarnation) == (3, info.incarnation)


async def test_a_drained_target_is_empty_soon_and_can_be_used_again(model: Path) -> None:
    """Running requests move, nothing new comes, and Undrain undoes it."""
    async with (
        target("t0") as first,
        target("t1") as second,
        fake_draft(FakeDraft(incarnation="d0")) as draft,
        serving(model, [first, second], [draft]) as server,
        admin_of(server) as admin,
        AsyncClient(server.address) as client,
    ):
        streams = [asyncio.create_task(stream(client)) for _ in range(6)]
        await eventually(lambda: bool(first.engine.requests and second.engine.requests))
        reply = await admin.Drain(pb.DrainRequest(worker=first.address))
        assert reply.num_requests > 0
        await eventually(lambda: not first.engine.requests)
        assert not all(task.done() for task in streams)
        assert await state_of(admin, first.address) == "DRAINING"
        assert await state_of(admin, second.address) == "READY"
        assert await stream(client) == generate(PROMPT, LONG)
        num_opened = sum(isinstance(m, TargetOpen) for m in first.engine.received)
        assert await asyncio.gather(*streams) == [generate(PROMPT, LONG)] * 6
        assert sum(isinstance(m, TargetOpen) for m in first.engine.received) == num_opened

        await admin.Undrain(pb.UndrainRequest(worker=first.address))
        await becomes(admin, first.address, "READY")
        await admin.Drain(pb.DrainRequest(worker=second.address))
        await becomes(admin, second.address, "DRAINING")
        assert await stream(client) == generate(PROMPT, LONG)
        assert sum(isinstance(m, TargetOpen) for m in first.engine.received) == num_opened + 1
        await freed(first, second, draft)


async def test_a_draft_that_fits_no_target_is_listed_as_unpaired_with_the_reason(
    model: Path,
) -> None:
    """And the tables of operators show both."""
    misfit = FakeDraft(incarnation="d1", width=WIDTH + 1)
    async with (
        target("t0") as worker,
        fake_draft(FakeDraft(incarnation="d0")) as good,
        fake_draft(misfit) as bad,
        serving(model, [worker], [good, bad]) as server,
        admin_of(server) as admin,
    ):
        await becomes(admin, bad.address, "UNPAIRED")
        await becomes(admin, good.address, "READY")
        reply = await admin.ListWorkers(pb.ListWorkersRequest())
    problems = {status.address: status.problem for status in reply.workers}
    assert problems[worker.address] == problems[good.address] == ""
    assert "feature rows" in problems[bad.address]
    sample = Sample(at_s=0.0, workers=tuple(reply.workers), stats=pb.StatsResponse())
    later = dataclasses.replace(sample, at_s=1.0)
    for tables in ([workers_table(reply.workers)], frame(sample, later)):
        console = Console(width=200, file=io.StringIO(), record=True)
        console.print(*tables)
        text = console.export_text()
        assert "unpaired" in text and "feature rows" in text


async def test_who_comes_while_the_only_target_drains_waits(model: Path) -> None:
    async with (
        target("t0") as worker,
        serving(model, [worker], step_timeout_s=60.0) as server,
        admin_of(server) as admin,
        AsyncClient(server.address, max_retries=0) as client,
    ):
        await admin.Drain(pb.DrainRequest(worker=worker.address))
        await becomes(admin, worker.address, "DRAINING")
        late = asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=4))
        await eventually(lambda: server.orchestrator.pool.num_waiting == 1)
        await admin.Undrain(pb.UndrainRequest(worker=worker.address))
        done = await asyncio.wait_for(late, 60)
        assert list(done.token_ids) == generate(PROMPT, 4)


async def test_every_orchestrator_hears_of_a_drain(model: Path) -> None:
    """The worker holds it: whoever connects later sees it too."""
    async with target("t0") as worker, serving(model, [worker]) as server:
        async with serving(model, [worker]) as other:
            async with admin_of(server) as admin:
                await admin.Drain(pb.DrainRequest(worker=worker.address))
            async with admin_of(other) as admin:
                await becomes(admin, worker.address, "DRAINING")
        async with serving(model, [worker]) as late, admin_of(late) as admin:
            await becomes(admin, worker.address, "DRAINING")


async def test_an_aborted_request_ends_and_frees_its_workers(model: Path) -> None:
    async with (
        target("t0") as worker,
        serving(model, [worker]) as server,
        admin_of(server) as admin,
        AsyncClient(server.address) as client,
    ):
        request = asyncio.create_task(stream(client, "mine"))
        await eventually(lambda: bool(worker.engine.requests))
        await admin.Abort(pb.AbortRequest(request_id="mine"))
        with pytest.raises(AbortedError) as caught:
            await request
        assert caught.value.reason == "ABORTED"
        await freed(worker)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await admin.Abort(pb.AbortRequest(request_id="mine"))
        assert from_rpc_error(refused.value).reason == "REQUEST_NOT_FOUND"
        stats = await admin.Stats(pb.StatsRequest())
        assert dict(stats.num_ended) == {"ABORTED": 1}


async def test_a_request_whose_client_reads_nothing_can_be_aborted_too(model: Path) -> None:
    """It ends at once, whatever was generated; the client hears of it once it reads."""
    async with (
        fake_target() as worker,
        serving(model, [worker]) as server,
        admin_of(server) as admin,
        unread(server.address, 1, NUM_LONG, request_id="mine") as (call,),
    ):
        requests = server.orchestrator._running._requests
        await eventually(
            lambda: any(not held.generation.events.has_room for held in requests.values())
        )
        await admin.Abort(pb.AbortRequest(request_id="mine"))
        await freed(worker)
        async with asyncio.timeout(60):
            while dict((await admin.Stats(pb.StatsRequest())).num_ended) != {"ABORTED": 1}:
                await asyncio.sleep(0.01)
        tokens, error = await read_on(call)
        assert error is not None and from_rpc_error(error).reason == "ABORTED"
        assert tokens == generate(PROMPT, NUM_LONG)[: len(tokens)]


async def test_figures_add_up_over_running_and_ended_requests(model: Path) -> None:
    async with (
        target("t0") as worker,
        fake_draft(FakeDraft(incarnation="d0")) as draft,
        serving(model, [worker], [draft]) as server,
        admin_of(server) as admin,
        AsyncClient(server.address) as client,
    ):
        assert await stream(client) == generate(PROMPT, LONG)
        stats = await admin.Stats(pb.StatsRequest())
        assert (stats.num_waiting, stats.num_prefilling, stats.num_decoding) == (0, 0, 0)
        assert dict(stats.num_ended) == {"length": 1}
        assert stats.num_output_tokens == LONG
        assert sum(stats.num_rounds_by_source.values()) == stats.num_rounds > 0
        assert stats.num_rounds_by_source["relayed"] > 0
        # All tokens but that of the prefill are accepted drafts or bonus tokens.
        assert stats.num_accepted_drafts + stats.num_rounds == LONG - 1
        assert stats.num_draft_tokens > stats.num_accepted_drafts > 0
        assert stats.num_processes == 1
        request = asyncio.create_task(stream(client))
        async with asyncio.timeout(60):
            while not stats.num_decoding:
                await asyncio.sleep(0.01)
                stats = await admin.Stats(pb.StatsRequest())
        assert stats.num_output_tokens > LONG
        await request


async def test_a_request_that_waits_for_a_target_is_counted(model: Path) -> None:
    async with (
        target("t0") as worker,
        serving(model, [worker], step_timeout_s=30.0) as server,
        admin_of(server) as admin,
        AsyncClient(server.address) as client,
    ):
        request = asyncio.create_task(stream(client, "mine"))
        await eventually(lambda: bool(worker.engine.requests))
        worker.handle.kill()
        await asyncio.gather(worker.running, return_exceptions=True)
        stats = pb.StatsResponse()
        async with asyncio.timeout(60):
            while not stats.num_waiting:
                await asyncio.sleep(0.01)
                stats = await admin.Stats(pb.StatsRequest())
        assert await state_of(admin, worker.address) == "CONNECTING"
        await admin.Abort(pb.AbortRequest(request_id="mine"))
        with pytest.raises(AbortedError):
            await request


async def test_log_levels_and_configurations(model: Path) -> None:
    async with (
        target("t0") as worker,
        serving(model, [worker], max_num_requests=7) as server,
        admin_of(server) as admin,
    ):
        name = "orchestrator.made_up"
        for asked, level in (("debug", logging.DEBUG), ("error", logging.ERROR)):
            await admin.SetLogLevel(pb.SetLogLevelRequest(logger=name, level=asked))
            assert logging.getLogger(name).level == level
        name = "target_service.made_up"
        order = pb.SetLogLevelRequest(worker=worker.address, logger=name, level="debug")
        await admin.SetLogLevel(order)
        assert logging.getLogger(name).level == logging.DEBUG
        for worker_address in ("", worker.address):
            order = pb.SetLogLevelRequest(worker=worker_address, level="loud")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await admin.SetLogLevel(order)
            assert from_rpc_error(refused.value).field == "level"
        config = await admin.GetConfig(pb.GetConfigRequest())
        assert config.values["max_num_requests"] == "7"
        config = await admin.GetConfig(pb.GetConfigRequest(worker=worker.address))
        assert config.values["drain_timeout_s"] == "300.0"


async def test_what_cannot_be_done_is_refused_by_name(model: Path) -> None:
    async with (
        target("t0") as worker,
        serving(model, [worker]) as server,
        admin_of(server) as admin,
    ):
        for call, request, reason in (
            (admin.Drain, pb.DrainRequest(worker="nowhere:1"), "WORKER_NOT_FOUND"),
            (admin.StopProfile, pb.StopProfileRequest(worker=worker.address), "NO_PROFILE"),
            (
                admin.StartProfile,
                pb.StartProfileRequest(worker=worker.address, num_steps=201),
                "INVALID_ARGUMENT",
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(request)
            assert from_rpc_error(refused.value).reason == reason


async def test_operators_are_not_served_unless_wanted(model: Path) -> None:
    async with target("t0") as worker, serving(model, [worker], admin_port=-1) as server:
        assert server.orchestrator.admin_port == -1
        async with open_channel(server.address) as channel:  # nor where clients are
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await pb_grpc.AdminServiceStub(channel).Stats(pb.StatsRequest())
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_requests_that_outlast_a_shutdown_end_so_that_clients_resume_them(
    model: Path,
) -> None:
    """They say so themselves, instead of a broken connection; a server that comes back goes on."""
    async with target("t0") as worker:
        async with (
            serving(model, [worker], drain_timeout_s=0.3) as server,
            AsyncClient(server.address, max_retries=0) as client,
        ):
            stopping = asyncio.create_task(server.orchestrator.serve_until_stopped())
            request = asyncio.create_task(stream(client))
            await eventually(lambda: bool(worker.engine.requests))
            server.orchestrator.request_stop()
            with pytest.raises(UnavailableError) as caught:
                await request
            assert caught.value.reason == "DRAINING"
            await stopping
        await freed(worker)


async def test_a_client_goes_on_on_the_server_that_follows(model: Path) -> None:
    async with target("t0") as worker:
        async with serving(model, [worker], drain_timeout_s=0.2, port=free_ports(1)) as server:
            client = AsyncClient(server.address, max_retries=100)
            stopping = asyncio.create_task(server.orchestrator.serve_until_stopped())
            request = asyncio.create_task(stream(client))
            await eventually(lambda: bool(worker.engine.requests))
            server.orchestrator.request_stop()
            await stopping
        async with client, serving(model, [worker], port=server.port):
            assert await asyncio.wait_for(request, 60) == generate(PROMPT, LONG)
        await freed(worker)
