"""Several orchestrator processes on one port, as they are started for real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice import AsyncClient
from coppice.v1 import admin_pb2, admin_pb2_grpc
from coppice.v1 import generation_pb2 as pb
from coppice.v1 import generation_pb2_grpc as pb_grpc
from shared.messages import TargetOpen, TokenDelta
from shared.rpc.channel import open_channel
from shared.rpc.health_names import process_name
from tests.contract.serving import freed, write_model
from tests.fakes import FakeWorker, eventually, fake_target, generate
from tests.processes import is_alive, is_spawned
from tests.scrape import free_ports

pytestmark = pytest.mark.asyncio

PROMPT = [5, 6, 7]
NUM_WORKERS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A parent and the processes that share its port."""

    process: asyncio.subprocess.Process
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pids(self) -> list[int]:
        """Return the processes that serve, or start to."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = [int(pid) for pid in path.read_text().split()]
        return [pid for pid in children if is_alive(pid) and is_spawned(pid)]

    @contextlib.asynccontextmanager
    async def channel_to(self, pid: int) -> AsyncIterator[grpc.aio.Channel]:
        """Connect until the kernel chooses this process, and it is ready."""
        async with asyncio.timeout(180):
            while True:
                async with open_channel(self.address) as channel:
                    if await _is_served_by(channel, pid):
                        yield channel
                        return
                await asyncio.sleep(0.02)


async def _is_served_by(channel: grpc.aio.Channel, pid: int) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        for name in (process_name(pid), "coppice.v1.GenerationService"):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            if reply.status != health_pb2.HealthCheckResponse.SERVING:
                return False
    except grpc.aio.AioRpcError:
        return False
    return True


def _command(model: Path, target: str, port: int, **options: Any) -> list[str]:
    flags = {"workers": NUM_WORKERS, "port": port, "targets": target, "model": model, **options}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    command = [sys.executable, "-m", "coppice", "serve", "orchestrator", "--host=127.0.0.1"]
    return [*command, *arguments]


@contextlib.asynccontextmanager
async def sharing(model: Path, target: FakeWorker, **options: Any) -> AsyncIterator[Shared]:
    """Serve with this target until the block ends."""
    port = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        *_command(model, target.address, port, **options)
    )
    shared = Shared(process=process, port=port)
    try:
        async with asyncio.timeout(180):
            while len(shared.pids) < NUM_WORKERS:
                assert process.returncode is None
                await asyncio.sleep(0.02)
        yield shared
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _complete(
    channel: grpc.aio.Channel, num_tokens: int, *, request_id: str = ""
) -> list[int]:
    request = pb.GenerateRequest(
        request_id=request_id,
        token_ids=pb.TokenIds(ids=PROMPT),
        stopping=pb.StoppingCriteria(max_new_tokens=num_tokens),
    )
    stub = pb_grpc.GenerationServiceStub(channel)
    return [i async for response in stub.Generate(request) for i in response.delta.token_ids]


async def test_every_process_serves_on_the_port_and_all_end_in_order(model: Path) -> None:
    """A request through each of them, at the same time; running ones finish after SIGTERM."""
    async with fake_target(step_s=0.01) as target, sharing(model, target) as shared:
        async with contextlib.AsyncExitStack() as stack:
            pids = shared.pids
            assert len(pids) == NUM_WORKERS
            channels = [await stack.enter_async_context(shared.channel_to(pid)) for pid in pids]
            assert target.worker.servicer.sessions.num_sessions == NUM_WORKERS
            target.handle.pause()  # none ends before all have come
            running = asyncio.gather(*(_complete(channel, 60) for channel in channels))
            await eventually(lambda: target.handle.num_waiting(TargetOpen) == NUM_WORKERS)
            shared.process.terminate()
            target.handle.resume()
            assert await running == [generate(PROMPT, 60)] * NUM_WORKERS
        assert await shared.process.wait() == 0
        assert not any(map(is_alive, pids))
        await freed(target)


async def test_a_process_that_dies_is_started_again_and_its_streams_go_on_exactly(
    model: Path,
) -> None:
    """Clients resume at another process, or at the new one; the rest is not disturbed."""
    async with (
        fake_target(step_s=0.01) as target,
        sharing(model, target) as shared,
        AsyncClient(shared.address, max_retries=300) as client,
    ):
        pids = shared.pids
        tokens: list[int] = []
        async for event in client.stream(token_ids=PROMPT, max_new_tokens=200):
            if isinstance(event, TokenDelta):
                tokens += event.token_ids
            if pids and len(tokens) > 20:
                for pid in pids:  # whichever serves it
                    os.kill(pid, signal.SIGKILL)
                pids.clear()
        assert tokens == generate(PROMPT, 200)
        async with asyncio.timeout(180):
            while len(shared.pids) < NUM_WORKERS:
                await asyncio.sleep(0.02)
        for pid in shared.pids:
            async with shared.channel_to(pid) as channel:
                assert await _complete(channel, 10) == generate(PROMPT, 10)
        assert len(shared.pids) == NUM_WORKERS
        await freed(target)


async def test_all_processes_together_admit_as_many_requests_as_they_may(model: Path) -> None:
    """One request at each is all; the place of a process that dies becomes free."""
    async with (
        fake_target(step_s=0.01) as target,
        sharing(model, target, max_num_requests=NUM_WORKERS) as shared,
        contextlib.AsyncExitStack() as stack,
    ):
        pids = shared.pids
        channels = [await stack.enter_async_context(shared.channel_to(pid)) for pid in pids]
        target.handle.pause()  # none ends before others have been refused
        running = [asyncio.create_task(_complete(channel, 3000)) for channel in channels]
        await eventually(lambda: target.handle.num_waiting(TargetOpen) == NUM_WORKERS)
        for channel in channels:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _complete(channel, 1)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        target.handle.resume()
        os.kill(pids[0], signal.SIGKILL)
        async with asyncio.timeout(180):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert await _complete(channels[1], 4) == generate(PROMPT, 4)
                    break
                await asyncio.sleep(0.05)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await freed(target)


async def test_operators_reach_the_requests_of_all_processes(model: Path) -> None:
    """Whichever process they are connected to, and whichever was started again meanwhile."""
    admin_port = free_ports(1)
    async with contextlib.AsyncExitStack() as stack:
        target = await stack.enter_async_context(fake_target(step_s=0.01))
        shared = await stack.enter_async_context(sharing(model, target, admin_port=admin_port))
        pids = shared.pids
        channels = [await stack.enter_async_context(shared.channel_to(pid)) for pid in pids]
        running = [
            asyncio.create_task(_complete(channel, 3000, request_id=f"r{index}"))
            for index, channel in enumerate(channels)
        ]
        sessions = target.worker.servicer.sessions
        await eventually(lambda: sessions.num_requests == NUM_WORKERS)

        async def ask(method: str, **fields: str) -> Any:
            async with open_channel(f"127.0.0.1:{admin_port}") as channel:
                call = getattr(admin_pb2_grpc.AdminServiceStub(channel), method)
                return await call(getattr(admin_pb2, f"{method}Request")(**fields))

        async with asyncio.timeout(180):
            for _ in range(4):  # each over a connection of its own, which the kernel deals out
                # A process that has to wait for a core for seconds is left out.
                while (stats := await ask("Stats")).num_processes < NUM_WORKERS:
                    await asyncio.sleep(0.01)
                assert stats.num_prefilling + stats.num_decoding == NUM_WORKERS
        for index, task in enumerate(running):
            await ask("Abort", request_id=f"r{index}")
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await task
            assert ended.value.code() is grpc.StatusCode.ABORTED
        async with asyncio.timeout(60):  # a client may hear of the end before it is counted
            while dict((await ask("Stats")).num_ended) != {"ABORTED": NUM_WORKERS}:
                await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask("Abort", request_id="r0")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        os.kill(pids[0], signal.SIGKILL)
        async with asyncio.timeout(180):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    stats = await ask("Stats")
                    if stats.num_processes == NUM_WORKERS and not set(pids) <= set(shared.pids):
                        break
                await asyncio.sleep(0.05)
        assert dict(stats.num_ended) == {"ABORTED": NUM_WORKERS - 1}
        await freed(target)


async def test_a_port_that_is_taken_is_refused(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *_command(model, "127.0.0.1:1", port), stderr=asyncio.subprocess.PIPE
        )
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in errors.decode()


async def test_a_configuration_that_cannot_work_ends_all_of_them(tmp_path: Path) -> None:
    command = _command(tmp_path / "nothing", "127.0.0.1:1", 0)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert "nothing" in errors.decode()
