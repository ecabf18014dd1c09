"""Worker processes whose front is stopped: no request stays on them, and none goes there."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from coppice import AsyncClient, Completion
from tests.contract.serving import Serving, serving, write_model
from tests.contract.test_worker_process import start
from tests.fakes import eventually, generate

pytestmark = pytest.mark.asyncio

PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 60


async def ask(server: Serving) -> Completion:
    async with AsyncClient(server.address) as client:
        return await client.generate(token_ids=PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)


async def test_no_request_stays_on_a_silent_worker_or_goes_there(tmp_path: Path) -> None:
    """Long before the step timeout; and it is used again once it answers."""
    expected = tuple(generate(PROMPT, NUM_TOKENS))
    async with start() as one, start() as two:
        addresses = {await one.ready(): one, await two.ready(): two}
        async with serving(
            write_model(tmp_path / "model"), list(addresses), step_timeout_s=300.0
        ) as server:
            assert (await ask(server)).token_ids == expected
            stopped = addresses[server.orchestrator.pool.targets[0].address]
            os.kill(stopped.pid, signal.SIGSTOP)
            requests = [asyncio.create_task(ask(server)) for _ in range(4)]
            async with asyncio.timeout(120.0):
                ended = await asyncio.gather(*requests)
            assert [completion.token_ids for completion in ended] == [expected] * 4
            assert server.num_targets == 1
            await asyncio.sleep(2.0)
            assert server.num_targets == 1, "a stopped process takes connections, but nothing else"
            late = await ask(server)
            assert (late.token_ids, late.retries) == (expected, 0), "it went to the other at once"
            os.kill(stopped.pid, signal.SIGCONT)
            await eventually(lambda: server.num_targets == 2)
