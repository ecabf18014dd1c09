"""Two hosts, each with a target and a draft, and the network between them fails.

Where no network namespaces may be made, what holds data back is a proxy: "cut a target off" and its
like in test_fault_schedules.py.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coppice import Completion
from coppice.stack import StackConfig
from tests.e2e.callers import Caller, calling, go_on
from tests.e2e.far_host import FarHost, far_host
from tests.e2e.fault_schedules import GO_ON_TIMEOUT_S
from tests.e2e.serving import STARTED, PlainOutputs, Server, stack_config
from tests.e2e.test_fault_schedules import REQUESTS
from tests.marks import exhaustive
from tests.processes import is_alive, wait_for, with_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_CALLERS = 2
BRIEF_S = 2.0
"""Shorter than it takes to leave a worker that says nothing."""
FAR_WORKERS = ("target-1", "draft-1")


class TwoHosts(Server):
    """Workers with number 0 are on this machine, those with number 1 on another one."""

    def __init__(self, config: StackConfig, far: FarHost) -> None:
        super().__init__(config)
        self.far = far

    @property
    def target_addresses(self) -> list[str]:
        """Return HOST:PORT of each target in the network of both hosts."""
        return [self.data_address(name) for name in self.services if name.startswith("target-")]

    @property
    def draft_addresses(self) -> list[str]:
        """Return HOST:PORT of each draft in the network of both hosts."""
        return [self.data_address(name) for name in self.services if name.startswith("draft-")]

    def data_address(self, name: str) -> str:
        """Return HOST:PORT of a worker in the network that may fail."""
        return f"{self._host(name)}:{self._port(name)}"

    def build(self) -> None:
        """Make every service, each worker on its host."""
        super().build()
        for name, service in self.services.items():
            if name == "orchestrator":
                continue
            service.command.append("--host=0.0.0.0")
            if name.startswith("target-"):
                service.command.append(f"--peer-host={self._host(name)}")
            if name.endswith("-1"):
                service.command = self.far.command(service.command)
                service.health_address = f"{self.far.supervised_address}:{self._port(name)}"
                service.environ["PYTHONPATH"] = with_path(Path.cwd())["PYTHONPATH"]
            service.address = self.data_address(name)

    def _host(self, name: str) -> str:
        return self.far.address if name.endswith("-1") else self.far.here

    def _port(self, name: str) -> str:
        return self.services[name].address.rpartition(":")[2]


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    """Return an orchestrator and a pair here, and a pair on another host; default timeouts."""
    with far_host() as far:
        if far is None:
            pytest.skip("network namespaces may not be made here")
        server = TwoHosts(stack_config(num_targets=2, num_drafts=2), far)
        with server:
            STARTED.append(server)
            try:
                yield server
            finally:
                with contextlib.suppress(ValueError):  # it was found to hold something
                    STARTED.remove(server)
                processes = server.processes()
        wait_for(lambda: not any(is_alive(pid) for pid in processes))
        assert not list(far.files.shared.iterdir())


@pytest.fixture(scope="module")
def plain(hosts: TwoHosts, plain_outputs: PlainOutputs) -> list[Completion]:
    return plain_outputs.of(hosts, REQUESTS)


@pytest.mark.parametrize("is_long", [*exhaustive([False]), True])
def test_a_partition_costs_no_token(
    hosts: TwoHosts, plain: list[Completion], *, is_long: bool
) -> None:
    """A short one is a pause; in a long one this host's workers do it all, then both again."""
    callers = [
        Caller(hosts.address, REQUESTS, plain, random.Random(f"{is_long} {i}"))
        for i in range(NUM_CALLERS)
    ]
    num_restarts = {name: service.num_restarts for name, service in hosts.services.items()}
    with calling(callers):
        assert go_on(callers, timeout_s=GO_ON_TIMEOUT_S)
        _wait_used(hosts)
        num_served, first_line = _num_served(hosts), len(hosts.log)
        with hosts.far.cut_off():
            time.sleep(BRIEF_S)
            if is_long:
                with hosts.slowed("target-0", pause_s=0.1):  # clients go on meanwhile, at less cost
                    for name in FAR_WORKERS:
                        wait_for(lambda name=name: _is_lost(hosts, name, first_line))
                assert go_on(callers, timeout_s=GO_ON_TIMEOUT_S), "one host is enough"
        assert go_on(callers, timeout_s=GO_ON_TIMEOUT_S)
        if is_long:
            wait_for(lambda: _num_served(hosts) >= num_served + 2)
        _wait_used(hosts)
    hosts.check_idle()
    assert num_restarts == {name: service.num_restarts for name, service in hosts.services.items()}
    assert all(caller.num_outputs for caller in callers)


def _wait_used(hosts: TwoHosts) -> None:
    """Wait until the target of the other host has requests."""
    wait_for(lambda: hosts.info("target-1").load.num_running > 0, GO_ON_TIMEOUT_S)


def _is_lost(hosts: TwoHosts, name: str, first_line: int) -> bool:
    """Return whether the orchestrator has left a worker: it said nothing, or writes failed."""
    address = hosts.data_address(name)
    return any("lost " in line and f"{address}:" in line for line in hosts.log[first_line:])


def _num_served(hosts: TwoHosts) -> int:
    """Return how often the orchestrator began to use workers of the other host."""
    return sum(hosts.logged(f"{hosts.data_address(name)} serves") for name in FAR_WORKERS)
