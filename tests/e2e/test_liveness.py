"""Processes that hang, with the default timeouts: they are killed and started again in seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from coppice import Completion
from shared.config import OrchestratorConfig, TargetConfig
from tests.e2e.serving import PlainOutputs, Server, running, stack_config
from tests.e2e.streaming import Stream, streams
from tests.e2e.test_operations import REQUESTS, SHORT, SHORT_LEN
from tests.marks import exhaustive
from tests.processes import wait_for

pytestmark = pytest.mark.slow

RESTART_TIMEOUT_S = 180.0
TIMEOUTS = ("draft_timeout_ms", "draft_open_timeout_ms", "step_timeout_s")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Return a target with a spare engine, and a draft without, which starts again."""
    defaults = OrchestratorConfig()
    config = stack_config(
        target={"spare_after_s": TargetConfig().spare_after_s},
        orchestrator={name: getattr(defaults, name) for name in TIMEOUTS},
    )
    with running(config) as server:
        yield server


@pytest.fixture(scope="module")
def plain(server: Server, plain_outputs: PlainOutputs) -> list[Completion]:
    """Return the outputs without speculation."""
    return plain_outputs.of(server, REQUESTS)


def stop(server: Server, name: str, part: str) -> None:
    """Stop the engine of a service, its front, or all of its processes."""
    front = server.services[name].pid
    assert front is not None
    if part == "all":
        server.kill(name, signal.SIGSTOP)
    else:
        os.kill(server.engine(name) if part == "engine" else front, signal.SIGSTOP)


def midway(running: list[Stream]) -> list[Stream]:
    """Return the streams that a target which was stopped has not finished."""
    count = -1
    while count != (count := sum(len(stream.deltas) for stream in running)):
        time.sleep(0.5)  # what was on its way has come
    return [stream for stream in running if stream.finish is None]


def longest_pause_s(stream: Stream, until: float) -> float:
    """Wait for the end, looking at the tokens; return the longest time without a new one."""
    longest_s, count, since = 0.0, -1, time.monotonic()
    while stream.finish is None:
        assert time.monotonic() < until, f"stuck after {count} tokens"
        if len(stream.deltas) != count:
            count, since = len(stream.deltas), time.monotonic()
        longest_s = max(longest_s, time.monotonic() - since)
        time.sleep(0.02)
    stream.result()
    return longest_s


# An engine is found by its front, a front by its watchdog, both by `coppice up`: whose they are
# makes no difference.
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("target-0", "engine"),
        ("draft-0", "front"),
        ("target-0", "all"),
        *exhaustive([("draft-0", "engine"), ("target-0", "front"), ("draft-0", "all")]),
    ],
)
def test_a_worker_that_is_stopped_is_replaced(
    server: Server, plain: list[Completion], name: str, part: str
) -> None:
    """No token is lost, repeated or changed; a stopped target costs a pause of seconds."""
    server.wait_paired()
    num_restarts = server.num_engines_lost(name)
    with streams(server.address, REQUESTS) as running:
        for stream in running:
            stream.reaches(20)
        stop(server, name, part)
        met = midway(running) if name == "target-0" else []
        pause_s = longest_pause_s(running[0], time.monotonic() + RESTART_TIMEOUT_S)
        for stream, alone in zip(running, plain, strict=True):
            finish = stream.result()
            assert stream.token_ids == alone.token_ids
            assert finish.retries > 0 or stream not in met
        assert met or name != "target-0", "the outputs had ended before"
    wait_for(lambda: server.num_engines_lost(name) == num_restarts + 1, RESTART_TIMEOUT_S)
    server.wait_paired()
    print(f"{name} {part}: longest pause {pause_s:.1f} s")  # noqa: T201


@pytest.mark.parametrize("name", ["draft-0", *exhaustive(["target-0"])])
def test_an_idle_engine_that_is_stopped_is_replaced(
    server: Server, plain: list[Completion], name: str
) -> None:
    num_restarts = server.num_engines_lost(name)
    stop(server, name, "engine")
    wait_for(lambda: server.num_engines_lost(name) == num_restarts + 1, RESTART_TIMEOUT_S)
    server.wait_paired()
    with streams(server.address, SHORT) as running:
        for stream, alone in zip(running, plain, strict=True):
            stream.result()
            assert stream.token_ids == alone.token_ids[:SHORT_LEN]
    server.wait_logged("the engine made no progress for", service=name)


def test_an_orchestrator_that_is_stopped_is_replaced(
    server: Server, plain: list[Completion]
) -> None:
    """The clients resume."""
    with streams(server.address, REQUESTS, max_retries=100) as running:
        for stream in running:
            stream.reaches(20)
        server.kill("orchestrator", signal.SIGSTOP)
        for stream, alone in zip(running, plain, strict=True):
            stream.result()
            assert stream.token_ids == alone.token_ids
    server.wait_paired()
