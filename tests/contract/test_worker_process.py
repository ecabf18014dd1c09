"""Worker processes as they are started for real, with a fake engine in the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest

from coppice.health import HealthProbe
from coppice.v1 import control_pb2, control_pb2_grpc, draft_pb2, target_pb2
from shared.messages import AcceptedPath, TargetClose, WorkerInfo, from_proto
from shared.peer.shared_files import RING_DIR, RINGS
from shared.rpc.channel import open_channel
from shared.rpc.engine_watch import FLOOR_S
from shared.rpc.health_names import TARGET_SERVICE
from shared.rpc.protocol import METADATA
from shared.rpc.startup_lines import Loading, Ready, parse_line
from tests.contract.driver import Peer, target_open, verify_after
from tests.contract.test_engine_process import wait_dead
from tests.fakes import generate
from tests.fakes.factories import factory
from tests.processes import is_alive
from tests.scrape import free_ports, scrape

pytestmark = pytest.mark.asyncio

ROOT = Path(__file__).resolve().parents[2]

PATIENT_S = 60.0
"""An engine that has to wait for a core for seconds is not hung."""
BRIEF_S = 11.0
"""Shorter than a step of `Plodding`."""
WORKER = textwrap.dedent(
    """
    import sys
    from shared.config import DraftConfig, TargetConfig
    from shared.rpc import engine_watch
    from shared.rpc.worker import run_worker

    role, factory, port, lease_dir, spare_after_s, metrics_port, floor_s = sys.argv[1:8]
    engine_watch.FLOOR_S = float(floor_s)
    if role == "target":
        from target_service.server import create_worker
        config_type = TargetConfig
    else:
        from draft_service.server import create_worker
        config_type = DraftConfig
    config = config_type(
        host="127.0.0.1",
        port=int(port),
        gpu_lease_dir=lease_dir,
        spare_after_s=float(spare_after_s),
        metrics_port=int(metrics_port),
    )
    code = run_worker(config, role=role, factory=factory, create_worker=create_worker)
    heavy = sorted({"torch", "transformers", "triton"} & set(sys.modules))
    sys.stdout.write(f"end heavy={heavy}\\n")
    sys.exit(code)
    """
)


@dataclass(kw_only=True)
class Process:
    """A worker process and what it printed so far."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def next_event(self) -> Loading | Ready:
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).decode():
            self.lines.append(line.strip())
            event = parse_line(line)
            if event is not None:
                return event
        raise AssertionError(f"the worker ended after {self.lines}")

    async def ready(self) -> str:
        """Return the address that it prints."""
        async with asyncio.timeout(180):
            while True:
                event = await self.next_event()
                if isinstance(event, Ready):
                    return event.address

    async def end(self) -> tuple[int, str, str]:
        """Return exit code, rest of the output, and errors."""
        async with asyncio.timeout(180):
            output, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, output.decode(), errors.decode()


@contextlib.asynccontextmanager
async def start(
    role: str = "target",
    engine: str = "create_target",
    *,
    port: int = 0,
    lease_dir: str = "",
    spare_after_s: float = 0.0,
    metrics_port: int = 0,
    floor_s: float = PATIENT_S,
) -> AsyncIterator[Process]:
    """Start a worker.

    Args:
        floor_s: How long its engine may be silent at least before it counts as hung.
    """
    more = (str(port), lease_dir, str(spare_after_s), str(metrics_port), str(floor_s))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, role, factory(engine), *more),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield Process(process=process)
    finally:
        if process.returncode is None:
            process.kill()
        # Also of one that was reaped already: its pipes are closed when they have been read.
        await process.communicate()


async def target_info(peer: Peer) -> WorkerInfo:
    reply = await peer.target.GetInfo(target_pb2.TargetServiceGetInfoRequest())
    info: WorkerInfo = from_proto(reply.info)
    return info


def engine_pid(info: WorkerInfo) -> int:
    """The fake engines put their process id into their incarnation."""
    match = re.fullmatch(r"pid-(\d+)", info.incarnation)
    assert match is not None
    return int(match[1])


async def test_target_starts_serves_and_drains_on_sigterm() -> None:
    async with start() as worker:
        stages = [await worker.next_event(), await worker.next_event()]
        assert stages == [
            Loading(role="target", fraction=0.25, stage="reading weights"),
            Loading(role="target", fraction=0.75, stage="warming up"),
        ]
        async with Peer(await worker.ready()) as peer:
            engine = engine_pid(await target_info(peer))
            assert engine != worker.pid and is_alive(engine)
            session = peer.target_session()
            await session.send(target_open(prompt=(1, 2, 3)))
            path = await session.next(AcceptedPath)
            for _ in range(2):  # from a supervisor and from a dying parent
                worker.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
            await session.send(verify_after(path))
            path = await session.next(AcceptedPath)
            assert path.token_ids == tuple(generate((1, 2, 3), 2)[1:])
            await session.send(TargetClose(request_id="a", target_epoch=1))
            code, output, _ = await worker.end()
        assert code == 0
        assert "end heavy=[]" in output, "the front never imports torch"
        assert not is_alive(engine)


async def test_draft_starts_and_serves() -> None:
    async with start("draft", "create_draft") as worker, Peer(await worker.ready()) as peer:
        reply = await peer.draft.GetInfo(draft_pb2.DraftServiceGetInfoRequest())
        assert from_proto(reply.info).kind == "eagle3"
        worker.process.send_signal(signal.SIGINT)
        code, output, _ = await worker.end()
        assert code == 0 and "end heavy=[]" in output


async def test_killed_engine_ends_the_worker_with_an_error() -> None:
    async with start() as worker, Peer(await worker.ready()) as peer:
        os.kill(engine_pid(await target_info(peer)), signal.SIGKILL)
        code, _, errors = await worker.end()
        assert code == 1
        assert "the engine process was killed by signal 9" in errors


async def test_failing_engine_ends_the_worker_and_its_log_says_why() -> None:
    async with start(engine="create_fragile") as worker, Peer(await worker.ready()) as peer:
        session = peer.target_session()
        await session.send(target_open("crash"))
        code, _, errors = await worker.end()
        assert code == 1
        assert "RuntimeError: device-side assert" in errors
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.next(AcceptedPath)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_engine_that_hangs_says_where_before_it_is_killed() -> None:
    hanging = start(engine="create_hanging", floor_s=FLOOR_S)
    async with hanging as worker, Peer(await worker.ready()) as peer:
        await peer.target_session().send(target_open("hang"))
        code, _, errors = await worker.end()
        assert code == 1
        assert re.search(r"most recent call first\):\n(  File .*\n)*  File .* in step\n", errors)
        assert "the engine made no progress for" in errors


async def test_a_slow_engine_is_not_taken_for_hung() -> None:
    """Its steps take longer than an engine may be silent."""
    plodding = start(engine="create_plodding", floor_s=BRIEF_S)
    async with plodding as worker, Peer(await worker.ready()) as peer:
        session = peer.target_session()
        await session.send(target_open("slow"))
        assert (await session.next(AcceptedPath)).request_id == "slow"
        assert worker.process.returncode is None


@pytest.mark.parametrize("signalled", ["front", "engine"])
async def test_a_worker_that_is_stopped_ends_by_itself(signalled: str) -> None:
    """With nobody who supervises it, as in a container; the engine is idle."""
    async with start(floor_s=FLOOR_S) as worker, Peer(await worker.ready()) as peer:
        engine = engine_pid(await target_info(peer))
        os.kill(engine if signalled == "engine" else worker.pid, signal.SIGSTOP)
        code, _, errors = await worker.end()
        assert code == (1 if signalled == "engine" else -9)
        # 5 s, or 20 times what its longest answer took.
        waits_s = re.findall(r"the engine made no progress for (\d+\.\d) s", errors)
        assert bool(waits_s) == (signalled == "engine")
        assert all(float(wait_s) >= FLOOR_S for wait_s in waits_s)
        assert (f"process {worker.pid} hangs, killing it" in errors) == (signalled == "front")
        await wait_dead(engine)


async def spare_pid(worker: Process, engine: int) -> int:
    """Wait for the process that would take over from an engine."""
    listing = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
    while True:
        for pid in map(int, listing.read_text().split()):
            with contextlib.suppress(FileNotFoundError):
                if pid != engine and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        await asyncio.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("number", "cause"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "hung")])
async def test_a_spare_engine_takes_over_at_the_same_address(
    number: signal.Signals, cause: str
) -> None:
    metrics_port = free_ports(1)

    async def num_ends(**labels: str) -> float:
        seen = await asyncio.to_thread(scrape, f"http://127.0.0.1:{metrics_port}/metrics")
        return seen.value("coppice_engine_ends_total", **labels)

    floor_s = FLOOR_S if cause == "hung" else PATIENT_S
    async with start(spare_after_s=0.1, metrics_port=metrics_port, floor_s=floor_s) as worker:
        address = await worker.ready()
        assert await num_ends() == 0
        async with Peer(address) as peer:
            engine = engine_pid(await target_info(peer))
        for _ in range(2):
            spare = await spare_pid(worker, engine)
            os.kill(engine, number)
            assert await worker.ready() == address
            await wait_dead(engine)
            async with Peer(address) as peer:
                engine = engine_pid(await target_info(peer))
                assert engine == spare
                session = peer.target_session()
                await session.send(target_open("after"))
                assert (await session.next(AcceptedPath)).request_id == "after"
                await session.send(TargetClose(request_id="after", target_epoch=1))
        assert await num_ends(cause=cause) == await num_ends() == 2
        spare = await spare_pid(worker, engine)
        worker.process.send_signal(signal.SIGTERM)
        code, output, errors = await worker.end()
        assert code == 0 and "end heavy=[]" in output
        assert errors.count("a spare one takes over") == 2
        await wait_dead(engine)
        await wait_dead(spare)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_a_worker_that_was_drained_stays_so_with_its_spare_engine() -> None:
    async with start(spare_after_s=0.1) as worker:
        address = await worker.ready()
        async with Peer(address) as peer:
            engine = engine_pid(await target_info(peer))
        await spare_pid(worker, engine)
        async with open_channel(address) as channel:
            control = control_pb2_grpc.WorkerControlServiceStub(channel)
            order = control_pb2.SetDrainingRequest(is_draining=True)
            await control.SetDraining(order, metadata=METADATA)
        os.kill(engine, signal.SIGKILL)
        assert await worker.ready() == address
        with HealthProbe(address) as probe:
            status = await asyncio.to_thread(probe.status, TARGET_SERVICE, timeout_s=60.0)
        assert status == "NOT_SERVING"


async def test_an_engine_that_dies_before_it_has_a_spare_ends_the_worker() -> None:
    async with start(spare_after_s=60.0) as worker, Peer(await worker.ready()) as peer:
        os.kill(engine_pid(await target_info(peer)), signal.SIGKILL)
        code, _, errors = await worker.end()
        assert code == 1 and "spare" not in errors


@pytest.mark.parametrize(
    ("engine", "code", "message"),
    [
        ("refuse", 2, "target: demo: tensor lm_head.weight is missing"),
        ("fail", 1, "RuntimeError: CUDA error: out of memory"),
        ("die_while_loading", 1, "killed by signal 9 while it was loading"),
    ],
)
async def test_worker_that_cannot_start_says_why(engine: str, code: int, message: str) -> None:
    async with start(engine=engine) as worker:
        actual, output, errors = await worker.end()
        assert actual == code
        assert message in errors
        assert "ready" not in output


async def test_taken_port_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with start(port=port) as worker:
            code, _, errors = await worker.end()
            assert code == 2
            assert f"cannot listen on 127.0.0.1:{port}" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_signal_while_loading_leaves_no_engine(number: signal.Signals) -> None:
    async with start(engine="create_slowly") as worker:
        event = await worker.next_event()
        assert isinstance(event, Loading)
        engine = int(event.stage.removeprefix("pid "))
        assert is_alive(engine)
        worker.process.send_signal(number)
        code, _, _ = await worker.end()
        assert code == (0 if number == signal.SIGTERM else -9)
        await wait_dead(engine)


async def test_an_engine_that_is_ended_while_it_loads_leaves_no_shared_memory() -> None:
    async with start(engine="create_ring_slowly") as worker:
        event = await worker.next_event()
        assert isinstance(event, Loading)
        ring = RING_DIR / event.stage
        assert RINGS.is_name(ring.name) and ring.exists()
        worker.process.send_signal(signal.SIGTERM)
        assert (await worker.end())[0] == 0
        assert not ring.exists()


async def test_killed_front_takes_its_engine_along() -> None:
    async with start() as worker, Peer(await worker.ready()) as peer:
        engine = engine_pid(await target_info(peer))
        worker.process.kill()
        await wait_dead(engine)


async def test_lines_are_read_back_as_they_were_written() -> None:
    assert parse_line("target loading  40% reading weights\n") == Loading(
        role="target", fraction=0.4, stage="reading weights"
    )
    assert parse_line("INFO target ready soon") is None
    assert parse_line("") is None
