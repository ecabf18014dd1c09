"""Peer rounds without a socket in common, as between hosts: over TCP, proven by the secret."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from coppice.stack import ServiceFailedError
from tests.e2e.serving import PlainOutputs, Server, running, stack_config
from tests.e2e.streaming import share_of_peer_rounds
from tests.e2e.test_peer_rounds import REQUESTS
from tests.processes import wait_for
from tests.tcp_pair import ACROSS_HOSTS

pytestmark = pytest.mark.slow

ATTACHED = "rounds and features go from engine to engine"
SECRET = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Files with the secret of the target, and with another one."""
    directory = tmp_path_factory.mktemp("secrets")
    files = {"own": SECRET, "another": SECRET[::-1]}
    for name, secret in files.items():
        (directory / name).write_text(secret)
    return {name: {"secret_file": str(directory / name)} for name in files}


@pytest.fixture(scope="module")
def across(secrets: dict[str, Any]) -> Iterator[Server]:
    """A target and a draft with the same secret."""
    target = {**ACROSS_HOSTS, **secrets["own"]}
    with running(stack_config(target=target, draft=secrets["own"])) as server:
        server.wait_paired()
        yield server


def test_rounds_go_over_tcp_also_after_the_target_was_killed(
    across: Server, plain_outputs: PlainOutputs
) -> None:
    info = across.info("target-0")
    assert info.peer_socket == "" and info.peer_address.startswith("127.0.0.1:")
    check_peer_rounds(across, plain_outputs)
    num_restarts = across.services["target-0"].num_restarts
    os.kill(across.engine("target-0"), signal.SIGKILL)
    wait_for(lambda: across.services["target-0"].num_restarts == num_restarts + 1)
    across.wait_paired()
    assert across.info("target-0").peer_address != info.peer_address
    check_peer_rounds(across, plain_outputs)
    assert across.logged(ATTACHED, service="draft-0") == 2, "requests share a channel"
    assert not across.logged(SECRET)


def check_peer_rounds(server: Server, plain_outputs: PlainOutputs) -> None:
    """Check that requests have peer rounds, for the most part.

    A draft dials for 2 s, which a process that has to wait for a core may miss, says so, and dials
    again some time later.
    """

    def have_peer_rounds() -> bool:
        share = share_of_peer_rounds(server, REQUESTS, plain_outputs)
        assert share > 0.5 or server.logged("no peer channel to", service="draft-0"), share
        return share > 0.5

    wait_for(have_peer_rounds)


class Refusing(Server):
    """A server that looks for pairs until it is known why there is none."""

    pairing_timeout_s = 2.0

    def _wait_speculating(self) -> None:
        self.wait_logged("the same --secret-file", service="orchestrator")
        self.wait_logged("refused /coppice.v1.DraftService/GetInfo", service="draft-0")
        super()._wait_speculating()


def test_a_draft_of_another_deployment_is_not_used_and_the_log_says_why(
    secrets: dict[str, Any],
) -> None:
    """It never hears of a request, so there are no rounds for its engine either."""
    target = {**ACROSS_HOSTS, **secrets["own"]}
    server = Refusing(
        stack_config(target=target, draft=secrets["another"], orchestrator=secrets["own"])
    )
    with pytest.raises(ServiceFailedError, match="no draft that fits"), server:
        pass
    assert not server.logged(ATTACHED)
    assert not server.logged(SECRET) and not server.logged(SECRET[::-1])
