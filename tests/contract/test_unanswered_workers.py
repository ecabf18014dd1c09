"""Workers that an orchestrator has no session with, or that are silent: operators see why."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from rich.console import Console

from coppice import AsyncClient
from coppice.cli.admin_tables import Sample, frame, workers_table
from coppice.v1 import admin_pb2 as pb
from coppice.v1 import admin_pb2_grpc as pb_grpc
from coppice.v1 import target_pb2
from orchestrator.endpoints import lookup
from shared.config import TargetConfig
from shared.messages import to_proto
from shared.rpc.channel import open_channel
from shared.rpc.health_names import TARGET_SERVICE
from target_service.server import create_worker
from tests.certificates import Authority
from tests.contract.serving import Serving, freed, serving, write_model
from tests.fakes import FakeDraft, FakeTarget, LocalEngine, eventually, fake_draft, fake_target

pytestmark = pytest.mark.asyncio

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def listed(server: Serving) -> list[pb.WorkerStatus]:
    """Return all workers as operators see them."""
    async with open_channel(f"127.0.0.1:{server.orchestrator.admin_port}") as channel:
        reply = await pb_grpc.AdminServiceStub(channel).ListWorkers(pb.ListWorkersRequest())
        return list(reply.workers)


async def status_when(
    server: Serving, address: str, condition: Callable[[pb.WorkerStatus], bool]
) -> pb.WorkerStatus:
    """Wait until a worker is listed as something."""
    deadline = asyncio.get_running_loop().time() + 60
    while True:
        workers = [worker for worker in await listed(server) if worker.address == address]
        for worker in workers:
            if condition(worker):
                return worker
        assert asyncio.get_running_loop().time() < deadline, workers
        await asyncio.sleep(0.01)


async def unanswered(server: Serving, address: str, reason: str) -> pb.WorkerStatus:
    """Return the status of a worker once an attempt to connect to it has failed for a reason.

    Before, one may have failed because this process had to wait for too long.
    """
    return await status_when(
        server,
        address,
        lambda w: w.state == pb.WORKER_STATE_CONNECTING and bool(re.search(reason, w.problem)),
    )


def printed(*workers: pb.WorkerStatus) -> str:
    """Return what `coppice admin workers` and `coppice top` print."""
    sample = Sample(at_s=0.0, workers=workers, stats=pb.StatsResponse())
    tables = [workers_table(workers), *frame(sample, sample)]
    console = Console(width=300, file=io.StringIO(), record=True)
    console.print(*tables)
    return console.export_text()


@contextlib.asynccontextmanager
async def loading_target() -> AsyncIterator[str]:
    """A target that loads its model until the end of the test."""
    worker = create_worker(
        TargetConfig(host="127.0.0.1", port=0), LocalEngine(FakeTarget(), load_s=300)
    )
    starting = asyncio.create_task(worker.start())
    await eventually(lambda: worker.server.port != 0)
    try:
        yield worker.address
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


async def test_who_is_not_there_yet_is_listed_with_the_reason(model: Path) -> None:
    """Nobody listens, the model is loading, or something else listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{reserved.getsockname()[1]}"
        async with (
            loading_target() as loading,
            fake_draft() as draft,
            serving(model, [nobody, loading, draft], waits=False) as server,
        ):
            reasons = {
                nobody: r"^UNAVAILABLE: \S+ Failed to connect to remote host: Connection refused$",
                loading: "^LOADING: the model is still loading",
                draft.address: "^UNIMPLEMENTED: .* serves no coppice.v1.TargetService$",
            }
            for address, reason in reasons.items():
                status = await unanswered(server, address, reason)
                assert status.role == "target" and not status.HasField("info")
                assert status.state_s > 0
                text = printed(status)
                assert text.count("connecting for ") == text.count(status.problem) == 2


@pytest.mark.parametrize(
    ("worker", "own", "reason"),
    [
        ("secret", "", "^NO_IDENTITY: .*the same --secret-file"),
        ("secret", "secret", "^WRONG_IDENTITY: .* another secret"),
        ("tls", "", "^UNAVAILABLE: "),
        ("tls", "tls", "^UNAVAILABLE: .*CERTIFICATE_VERIFY_FAILED"),
        ("", "tls", "^UNAVAILABLE: .*WRONG_VERSION_NUMBER"),
    ],
)
async def test_who_refuses_or_is_not_trusted_is_listed_with_the_reason(
    model: Path, tmp_path: Path, worker: str, own: str, reason: str
) -> None:
    def fields_of(kind: str, *, is_worker: bool) -> dict[str, Any]:
        name = "worker" if is_worker else "orchestrator"
        if kind == "secret":
            (tmp_path / name).write_text(f"a secret that only the {name} knows")
            return {"secret_file": str(tmp_path / name)}
        if kind == "tls":
            authority = Authority(tmp_path, name)
            files = authority.issue(f"{name}-certificate", hosts=("127.0.0.1",))
            own_files = {"tls_cert_file": files.cert, "tls_key_file": files.key}
            return own_files if is_worker else {"tls_ca_file": authority.file}
        return {}

    async with (
        fake_target(**fields_of(worker, is_worker=True)) as target,
        serving(model, [target], waits=False, **fields_of(own, is_worker=False)) as server,
    ):
        await unanswered(server, target.address, reason)


@pytest.mark.parametrize("garbled", ["GetInfo", "Session"])
async def test_who_sends_what_nobody_can_read_is_asked_again_and_again(
    model: Path, garbled: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A message that is none at all ends a session, and says why; the worker is not forgotten."""
    num_calls = 0

    def answer(method: str) -> bytes:
        nonlocal num_calls
        num_calls += method == garbled
        info = target_pb2.TargetServiceGetInfoResponse(info=to_proto(FakeTarget().info))
        return b"\xff\xff\xff" if method == garbled else info.SerializeToString()

    async def get_info(request: bytes, context: Any) -> bytes:
        return answer("GetInfo")

    async def session(requests: Any, context: Any) -> None:
        await context.write(answer("Session"))
        await asyncio.Event().wait()

    methods = {
        "GetInfo": grpc.unary_unary_rpc_method_handler(get_info),
        "Session": grpc.stream_stream_rpc_method_handler(session),
    }
    worker = grpc.aio.server()
    worker.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(TARGET_SERVICE, methods),)
    )
    address = f"127.0.0.1:{worker.add_insecure_port('127.0.0.1:0')}"
    await worker.start()
    try:
        async with serving(model, [address], waits=False) as server:
            await eventually(lambda: num_calls >= 3, timeout_s=60)
            await unanswered(server, address, "^AttributeError: ")
    finally:
        await worker.stop(0)
    assert any(address in record.message and record.exc_info for record in caplog.records)


async def test_a_name_without_an_address_is_listed_until_it_has_one(model: Path) -> None:
    """It goes by its name, and a name service that fails later hides no worker."""
    answers: list[set[str] | OSError] = [OSError(-2, "Name or service not known")]

    async def look_up(host: str, port: int) -> set[str]:
        if host == "127.0.0.1":
            return await lookup(host, port)
        if isinstance(answers[-1], OSError):
            raise answers[-1]
        return answers[-1]

    async with (
        fake_target() as target,
        serving(model, ["pair:50061"], lookup=look_up, waits=False) as server,
    ):
        await unanswered(
            server, "pair:50061", "^its name has no address: Name or service not known$"
        )
        answers.append(set())
        status = await status_when(
            server, "pair:50061", lambda w: w.problem == "its name has no address"
        )
        assert status.state_s > 0
        answers.append({target.address})
        await server.sees(targets=1, drafts=0)
        assert [worker.address for worker in await listed(server)] == [target.address]
        answers.append(OSError(-3, "Temporary failure in name resolution"))
        await asyncio.sleep(0.5)
        (status,) = await listed(server)
        assert (status.address, status.state) == (target.address, pb.WORKER_STATE_READY)


async def test_the_time_without_a_session_begins_when_the_session_ends(model: Path) -> None:
    async with fake_target() as target, serving(model, [target]) as server:
        ready = await status_when(server, target.address, lambda w: True)
        assert (ready.state, ready.problem, ready.state_s) == (pb.WORKER_STATE_READY, "", 0.0)
        await asyncio.sleep(1.2)  # a session that ends sooner counts as an attempt
        began = asyncio.get_running_loop().time()
        target.handle.kill()
        await asyncio.gather(target.running, return_exceptions=True)
        status = await status_when(server, target.address, lambda w: "refused" in w.problem)
        assert 0 < status.state_s <= asyncio.get_running_loop().time() - began
        later = await status_when(server, target.address, lambda w: w.state_s > status.state_s + 1)
        assert later.state == pb.WORKER_STATE_CONNECTING


async def test_a_draft_whose_engine_hangs_is_listed_as_silent(model: Path) -> None:
    """While requests wait for it, with what comes of it; it is ready again once it goes on."""
    async with (
        fake_target(FakeTarget(), step_s=0.01) as target,
        fake_draft(FakeDraft()) as draft,
        serving(model, [target], [draft], draft_open_timeout_ms=60_000.0) as server,
        AsyncClient(server.address) as client,
    ):
        request = asyncio.create_task(
            client.generate(token_ids=PROMPT, max_new_tokens=3000, speculation=True)
        )
        await eventually(lambda: bool(draft.engine.requests))
        draft.handle.pause()
        status = await status_when(
            server, draft.address, lambda w: w.state == pb.WORKER_STATE_SILENT
        )
        draft.handle.resume()
        assert status.problem == (
            "its engine makes no progress while requests wait for it; their rounds have no trees, "
            "and they leave it after 60 s (--draft-open-timeout-ms)"
        )
        assert 2.0 <= status.state_s < 60.0
        assert "silent for " in printed(status)
        for worker in (draft, target):
            await status_when(server, worker.address, lambda w: w.state == pb.WORKER_STATE_READY)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await freed(target, draft)
