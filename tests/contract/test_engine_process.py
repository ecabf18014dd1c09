"""The engine in its own process: start, traffic, threads, and every way to die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.config import TargetConfig
from shared.errors import ConfigError
from shared.messages import TargetOpen
from shared.rpc.engine import EngineDiedError, EnginePing
from shared.rpc.engine_process import EngineProcess
from tests.contract.driver import target_open
from tests.fakes.factories import factory
from tests.marks import exhaustive
from tests.processes import is_alive, with_path

TORCH_FACTORY = "tests.fakes.torch_engine:create_engine"

pytestmark = pytest.mark.asyncio

ROOT = Path(__file__).resolve().parents[2]


def no_progress(stage: str, fraction: float = 0.0) -> None:
    pass


@contextlib.asynccontextmanager
async def engine_process(
    name: str = "create_echo", config: TargetConfig | None = None, **more: Any
) -> AsyncIterator[EngineProcess]:
    engine = EngineProcess(factory(name), config or TargetConfig(), **more)
    try:
        yield engine
    finally:
        await engine.close()


async def collect(engine: EngineProcess, count: int) -> list[Any]:
    """Return the next `count` outputs."""
    outputs: list[Any] = []
    async with asyncio.timeout(60):
        async for report in engine.outputs():
            outputs += report.outputs
            if len(outputs) >= count:
                return outputs
    raise AssertionError("the engine ended")


@contextlib.contextmanager
def stopped(engine: EngineProcess) -> Iterator[None]:
    """Stop the engine's process for the length of the block."""
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine.pid, signal.SIGCONT)


async def wait_dead(pid: int) -> None:
    deadline = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is an orphan"
        await asyncio.sleep(0.02)


async def test_start_reports_progress_and_identity() -> None:
    stages: list[tuple[str, float]] = []

    def note(stage: str, fraction: float = 0.0) -> None:
        stages.append((stage, fraction))

    async with engine_process("create_target") as engine:
        info = await engine.start(note)
        assert stages == [("reading weights", 0.25), ("warming up", 0.75)]
        assert info.incarnation == f"pid-{engine.pid}" and engine.pid != os.getpid()


async def test_messages_keep_their_order_and_values() -> None:
    async with engine_process() as engine:
        await engine.start(no_progress)
        sent = [target_open(f"r{i}", prompt=range(1, i + 2)) for i in range(50)]
        for message in sent:
            engine.send([message])
        received = await collect(engine, len(sent))
        assert received == sent and isinstance(received[0], TargetOpen)
        assert not engine.is_pending


async def test_messages_without_an_answer_are_reported_together() -> None:
    async with engine_process() as engine:
        await engine.start(no_progress)
        reports = engine.outputs()
        await anext(reports)  # idle
        with stopped(engine):
            for _ in range(10):
                engine.send(["ignore"])
                await asyncio.sleep(0)
        num_reports = 0
        async with asyncio.timeout(60):
            while engine.is_pending:
                report = await anext(reports)
                assert (report.outputs, report.has_work) == ([], False)
                num_reports += 1
        assert report.num_received == 10
        assert num_reports < 5


async def test_front_never_waits_for_a_busy_engine() -> None:
    block = bytes(4 * 1024 * 1024)
    async with engine_process() as engine:
        await engine.start(no_progress)
        with stopped(engine):
            for index in range(8):
                engine.send([(index, block)])
            assert engine.is_pending
        received = await collect(engine, 8)
        assert [entry[0] for entry in received] == list(range(8))
        assert all(entry[1] == block for entry in received)


async def test_message_without_an_answer_is_not_pending_for_ever() -> None:
    async with engine_process() as engine:
        await engine.start(no_progress)
        engine.send(["hello"])
        await collect(engine, 1)
        engine.send(["ignore"])
        assert engine.is_pending
        async with asyncio.timeout(60):
            async for _ in engine.outputs():
                if not engine.is_pending:
                    break


async def test_queued_messages_share_a_step() -> None:
    async with engine_process() as engine:
        await engine.start(no_progress)
        with stopped(engine):
            for index in range(20):
                engine.send([index])
        sizes = []
        async for report in engine.outputs():
            if report.outputs:
                sizes.append(len(report.outputs))
            if sum(sizes) == 20:
                break
        assert sizes[-1] >= 19, "the engine may have begun with the first one"


async def test_environment_of_the_engine() -> None:
    async with engine_process(config=TargetConfig(cpu_threads=3)) as engine:
        await engine.start(no_progress)
        engine.send(["env OMP_NUM_THREADS", "env MKL_NUM_THREADS", "modules"])
        omp, mkl, modules = await collect(engine, 3)
        assert (omp, mkl) == ("3", "3")
        assert "torch" not in modules, "only a factory's own module imports it"
        assert "tests.contract.test_engine_process" not in modules


@pytest.mark.parametrize("cpu_threads", [0, 3, *exhaustive([1])])
async def test_torch_threads_are_set_before_the_factory_runs(cpu_threads: int) -> None:
    engine = EngineProcess(TORCH_FACTORY, TargetConfig(cpu_threads=cpu_threads))
    try:
        info = await engine.start(no_progress)
    finally:
        await engine.close()
    chosen = {cpu_threads} if cpu_threads else set(range(1, len(os.sched_getaffinity(0)) + 1))
    assert info.incarnation in {f"{count} threads" for count in chosen}


async def test_configuration_that_the_engine_refuses() -> None:
    async with engine_process("refuse", TargetConfig(model="/models/x")) as engine:
        with pytest.raises(ConfigError, match="/models/x: tensor lm_head.weight is missing"):
            await engine.start(no_progress)


@pytest.mark.parametrize(
    ("name", "message", "code"),
    [
        ("fail", "CUDA error: out of memory", 1),
        ("die_while_loading", "killed by signal 9 while it was loading", -9),
        ("no_such_function", "no_such_function", 1),
    ],
)
async def test_engine_that_cannot_start(name: str, message: str, code: int) -> None:
    async with engine_process(name) as engine:
        with pytest.raises(EngineDiedError, match=message) as caught:
            await engine.start(no_progress)
        assert caught.value.exit_code == code


@pytest.mark.parametrize(("order", "code"), [("raise", 1), ("exit", 7), ("kill", -9), ("break", 1)])
async def test_death_of_the_engine_ends_the_outputs(order: str, code: int) -> None:
    async with engine_process() as engine:
        await engine.start(no_progress)
        engine.send(["hello"])
        assert await collect(engine, 1) == ["hello"]
        if order == "kill":
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
        else:
            engine.send([order])
        with pytest.raises(EngineDiedError) as caught:
            async with asyncio.timeout(60):
                async for _ in engine.outputs():
                    pass
        assert caught.value.exit_code == code
        engine.send(["too late"])  # harmless


async def test_a_failure_ends_the_engine_at_once() -> None:
    """A CUDA error, for one: whatever still runs in the process is not waited for."""
    async with engine_process() as engine:
        await engine.start(no_progress)
        engine.send(["hold"])
        await collect(engine, 1)
        engine.send(["raise"])
        with pytest.raises(EngineDiedError) as caught:
            async with asyncio.timeout(60):  # the thread runs for 600 s
                async for _ in engine.outputs():
                    pass
        assert caught.value.exit_code == 1, "nobody had to kill it"


async def test_an_idle_engine_answers_a_ping() -> None:
    async with engine_process() as engine:
        await engine.start(no_progress)
        reports = engine.outputs()
        await anext(reports)  # idle
        engine.send([EnginePing()])
        assert engine.is_pending
        report = await asyncio.wait_for(anext(reports), 60)
        assert (report.outputs, report.num_received, report.has_work) == ([], 1, False)
        assert not engine.is_pending


async def test_a_long_step_is_reported_while_it_lasts() -> None:
    async with engine_process() as engine:
        await engine.start(no_progress)
        engine.send(["plod 2.5", "compile 0.1"])
        seen = []
        async with asyncio.timeout(60):
            async for report in engine.outputs():
                seen.append((report.has_work, report.is_slow, len(report.outputs)))
                if report.outputs:
                    break
        assert seen[-1] == (False, False, 2)
        assert seen[-2] == (True, True, 0)
        assert seen.count((True, False, 0)) >= 2


async def test_group_signals_do_not_end_the_engine_before_its_front() -> None:
    async with engine_process() as engine:
        await engine.start(no_progress)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGINT)
        os.kill(engine.pid, signal.SIGTERM)
        engine.send(["still here"])
        assert await collect(engine, 1) == ["still here"]


@pytest.mark.parametrize("name", ["create_echo", "create_slowly"])
async def test_close_ends_the_engine(name: str) -> None:
    engine = EngineProcess(factory(name), TargetConfig())
    if name == "create_slowly":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.start(no_progress), 1.5)
    else:
        await engine.start(no_progress)
    pid = engine.pid
    assert pid is not None and is_alive(pid)
    await engine.close()
    assert not is_alive(pid)


FRONT = textwrap.dedent(
    """
    import asyncio, os, signal, sys
    from shared.config import TargetConfig
    from shared.rpc.engine_process import EngineProcess

    async def main():
        engine = EngineProcess(sys.argv[1], TargetConfig())
        def show(stage, fraction=0.0):
            sys.stdout.write(f"{engine.pid}\\n")
            sys.stdout.flush()
        starting = asyncio.create_task(engine.start(show))
        if sys.argv[2] == "loading":
            await starting
        await starting
        if sys.argv[2] == "stepping":
            engine.send(["sleep 60"])
        show("")
        if sys.argv[2] == "exception":
            raise RuntimeError("the front fails without closing its engine")
        await asyncio.sleep(60)

    if __name__ == "__main__":
        asyncio.run(main())
    """
)


@pytest.mark.parametrize("state", ["idle", "stepping", "loading", "exception"])
async def test_no_orphan_when_the_front_dies(state: str, tmp_path: Path) -> None:
    script = tmp_path / "front.py"
    script.write_text(FRONT)
    name = "create_slowly" if state == "loading" else "create_echo"
    with subprocess.Popen(
        [sys.executable, str(script), factory(name), state],
        env=with_path(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as front:
        assert front.stdout is not None
        pid = int(await asyncio.to_thread(front.stdout.readline))
        if state != "exception":
            assert is_alive(pid)
            await asyncio.sleep(0.2)
            front.kill()
        await wait_dead(pid)
        assert await asyncio.to_thread(front.wait, 60) != 0


async def test_descriptors_stay_open_in_the_engine(tmp_path: Path) -> None:
    import fcntl

    def lock() -> int:
        fd = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise
        return fd

    held = lock()
    async with engine_process(kept_fds=[held]) as engine:
        await engine.start(no_progress)
        os.close(held)
        with pytest.raises(BlockingIOError):
            lock()
    os.close(lock())
