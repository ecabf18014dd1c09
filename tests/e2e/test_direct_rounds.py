"""Direct rounds between processes: the default on one host, the same outputs, no socket left."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from shared.feature_ring import RING_DIR
from tests.e2e.serving import PlainOutputs, Server, eventually, running, stack_config
from tests.e2e.streaming import streams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "def merge(left, right):\n", "max_new_tokens": 90, "ignore_eos": True},
    {
        "prompt": "import asyncio\n\n\nasync def main",
        "max_new_tokens": 90,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": 3,
    },
]


def share_of_direct_rounds(server: Server, plain_outputs: PlainOutputs) -> float:
    """Serve the requests, check their outputs, and return the share of direct rounds."""
    plain = plain_outputs.of(server, REQUESTS)
    rounds = []
    timed = [{**request, "round_times": True} for request in REQUESTS]
    with streams(server.address, timed) as running_streams:
        for stream, expected in zip(running_streams, plain, strict=True):
            rounds += stream.result().round_times
            assert tuple(stream.token_ids) == expected.token_ids
    names = [{stage.name for stage in times.stages} for times in rounds]
    return sum("draft: link" in stages for stages in names) / len(names)


def test_rounds_are_direct_on_one_host_also_after_the_target_was_killed(
    plain_outputs: PlainOutputs,
) -> None:
    with running(stack_config()) as server:
        server.wait_paired()
        first = server.info("target-0").link
        assert (RING_DIR / first).is_socket()
        assert share_of_direct_rounds(server, plain_outputs) > 0.8
        os.kill(server.engine("target-0"), signal.SIGKILL)
        eventually(lambda: server.services["target-0"].num_restarts == 1)
        server.wait_paired()
        second = server.info("target-0").link
        assert second != first and (RING_DIR / second).is_socket()
        assert not (RING_DIR / first).exists()
        assert share_of_direct_rounds(server, plain_outputs) > 0.8
    assert not (RING_DIR / second).exists()


def test_without_direct_rounds_the_orchestrator_drives_them(plain_outputs: PlainOutputs) -> None:
    with running(stack_config(target={"direct_rounds": False})) as server:
        server.wait_paired()
        assert server.info("target-0").link == ""
        assert share_of_direct_rounds(server, plain_outputs) == 0.0
