"""Worker processes whose front is stopped: no request stays on them, and none goes there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from coppice import AsyncClient, Completion
from coppice.v1 import admin_pb2 as pb
from tests.contract.serving import Serving, serving, write_model
from tests.contract.test_unanswered_workers import status_when
from tests.contract.test_worker_process import start
from tests.fakes import eventually, fake_target, generate

pytestmark = pytest.mark.asyncio

PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 60


async def ask(server: Serving) -> Completion:
    async with AsyncClient(server.address) as client:
        return await client.generate(token_ids=PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)


@contextlib.contextmanager
def unwatched(pid: int) -> Iterator[None]:
    """Let nobody kill a process that hangs for the length of the block: its watchdog is stopped."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (watchdog,) = (
        int(child)
        for child in children
        if b"num_silent" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    os.kill(watchdog, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(watchdog, signal.SIGCONT)


async def test_no_request_stays_on_a_silent_worker_or_goes_there(tmp_path: Path) -> None:
    """Long before the step timeout; and it is used again once it answers.

    The other one is no process of its own: it cannot be silent while this process runs.
    """
    expected = tuple(generate(PROMPT, NUM_TOKENS))
    async with start() as stopped, fake_target() as other:
        address = await stopped.ready()
        async with serving(
            write_model(tmp_path / "model"), [address, other], step_timeout_s=300.0
        ) as server:
            assert (await ask(server)).token_ids == expected
            with unwatched(stopped.pid):
                os.kill(stopped.pid, signal.SIGSTOP)
                requests = [asyncio.create_task(ask(server)) for _ in range(4)]
                silent = await status_when(server, address, lambda w: "says nothing" in w.problem)
                assert silent.state == pb.WORKER_STATE_SILENT and silent.state_s >= 2.0
                assert silent.problem.endswith("its session ends after 5 s")
                async with asyncio.timeout(120.0):
                    ended = await asyncio.gather(*requests)
                assert [completion.token_ids for completion in ended] == [expected] * 4
                assert server.num_targets == 1
                await asyncio.sleep(2.0)
                gone = await status_when(server, address, lambda w: True)
                assert gone.state == pb.WORKER_STATE_CONNECTING and gone.state_s > 0
                assert re.search("said nothing for 5 s|did not answer|time(d )?out", gone.problem)
                assert server.num_targets == 1, (
                    "a stopped process takes connections, but nothing else"
                )
                late = await ask(server)
                assert (late.token_ids, late.retries) == (expected, 0), (
                    "it went to the other at once"
                )
                os.kill(stopped.pid, signal.SIGCONT)
            await eventually(lambda: server.num_targets == 2)
            await status_when(server, address, lambda w: w.state == pb.WORKER_STATE_READY)
