"""A stack of real processes: what is killed comes back, and no output changes."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coppice import Client, PromptInfo, TokenDelta
from coppice.stack import ServiceFailedError, ServiceState, Stack, StackConfig
from shared.config import OrchestratorConfig, TargetConfig
from tests.e2e.serving import READY_TIMEOUT_S, PlainOutputs, Server
from tests.e2e.streaming import streams
from tests.processes import is_alive, members_of, wait_for

pytestmark = pytest.mark.slow

PROMPT = "def read_config(path):"
NUM_TOKENS = 96


def plain_config() -> StackConfig:
    """Return a configuration without a draft."""
    return StackConfig(
        orchestrator=OrchestratorConfig(host="127.0.0.1", port=0, drain_timeout_s=300.0),
        target=TargetConfig(device="cpu", cpu_threads=1),
        num_drafts=0,
        start_timeout_s=READY_TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def expected(pair: Server, plain_outputs: PlainOutputs) -> tuple[int, ...]:
    request = {"prompt": PROMPT, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    return plain_outputs.of(pair, [request])[0].token_ids


def processes_of(stack: Stack) -> set[int]:
    """Return every process of the stack's groups, engines included."""
    return members_of({service.pid for service in stack.services.values() if service.pid})


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["draft-0", "target-0"])
def test_a_worker_killed_in_mid_stream_changes_nothing(
    pair: Server, expected: tuple[int, ...], victim: str
) -> None:
    service = pair.services[victim]
    pair.wait_ready(*pair.services, timeout_s=180.0)
    num_restarts, token_ids = service.num_restarts, []
    with Client(pair.address) as client:
        events = client.stream(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)
        assert isinstance(next(events), PromptInfo)
        is_killed = False
        for event in events:
            if isinstance(event, TokenDelta):
                token_ids += event.token_ids
                if not is_killed:
                    pair.kill(victim)
                    is_killed = True
    assert tuple(token_ids) == expected
    wait_for(lambda: service.num_restarts == num_restarts + 1)
    wait_for(lambda: service.state is ServiceState.READY)


@pytest.mark.exhaustive
def test_a_stopped_draft_leaves_plain_decoding(pair: Server, expected: tuple[int, ...]) -> None:
    pair.stop_service("draft-0")
    assert pair.services["draft-0"].pid is None
    with Client(pair.address) as client:
        completion = client.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert completion.token_ids == expected
    assert completion.speculation.num_draft_tokens == 0
    pair.start_service("draft-0")

    def speculates() -> bool:
        with Client(pair.address) as client:
            stats = client.generate(
                PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, speculation=True
            ).speculation
        return stats.accept_length > 1.5

    wait_for(speculates)


def test_stop_lets_streams_finish_and_leaves_no_process(expected: tuple[int, ...]) -> None:
    """The workers go on until the orchestrator has nothing left."""
    stack = Stack(plain_config()).start()
    assert stack.draft_addresses == []
    running = processes_of(stack)
    assert len(running) >= 3  # orchestrator, front and engine of the target
    request = {"prompt": PROMPT, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    with streams(stack.address, [request]) as (stream,):
        stream.reaches(5)
        stack.stop()
        stream.result()
        assert stream.token_ids == expected
    wait_for(lambda: not any(is_alive(pid) for pid in running))
    assert {s.state for s in stack.services.values()} == {ServiceState.STOPPED}


def test_a_stack_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    config = plain_config()
    config = replace(config, target=replace(config.target, model=str(tmp_path / "none")))
    stack = Stack(config)
    with pytest.raises(ServiceFailedError) as caught:
        stack.start()
    assert "target-0 ended before it was ready" in str(caught.value)
    assert str(tmp_path / "none") in str(caught.value)
    assert caught.value.exit_code == 2
    assert [service.pid for service in stack.services.values()] == [None] * 2


def test_a_dead_parent_takes_its_services_along(tmp_path: Path) -> None:
    """Even SIGKILL, which leaves `coppice up` no time to stop anything."""
    log = tmp_path / "up.log"
    with log.open("wb") as stream:
        command = [sys.executable, "-m", "coppice", "up", "--port=0", "--device=cpu"]
        process = subprocess.Popen([*command, "--draft-model=none"], stdout=stream, stderr=stream)
    try:
        wait_for(lambda: "listens on" in log.read_text())
        tasks = Path(f"/proc/{process.pid}/task").iterdir()
        pids = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(pids) == 3  # target, orchestrator and gateway
    wait_for(lambda: not any(is_alive(pid) for pid in pids))
