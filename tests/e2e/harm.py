"""A stack on a host of its own, behind links that a test may cut: what faults are done to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import grpc

from coppice.stack import StackConfig
from shared.peer.shared_files import RING_DIR
from tests.e2e.clocks import Clocks, clocks
from tests.e2e.garbling import Garbler, garbler
from tests.e2e.private_host import PrivateHost, private_host
from tests.e2e.serving import STARTED, Server
from tests.e2e.tcp_links import Link, Links, tcp_links
from tests.processes import is_alive, is_spawned, members_of, oldest, wait_for, with_path

LIAR = "draft-0"
"""The draft that may be made to send garbage."""
END_TIMEOUT_S = 60.0


class HarmedStack(Server):
    """A stack whose connections are links, on a host whose memory, disk and clocks are its own."""

    def __init__(
        self, config: StackConfig, host: PrivateHost, links: Links, clocks: Clocks
    ) -> None:
        super().__init__(config)
        self.host = host
        self.clocks = clocks
        self.links: dict[str, Link] = {}
        """To each service, by name: from clients to the orchestrator, from others to a worker."""
        self.garbler: Garbler | None = None
        self._make_link = links.to
        self._ends = contextlib.ExitStack()

    @property
    def target_addresses(self) -> list[str]:
        """Return HOST:PORT of the links to the targets."""
        return [self._link(name) for name in self.services if name.startswith("target-")]

    @property
    def draft_addresses(self) -> list[str]:
        """Return HOST:PORT of the links to the drafts."""
        return [self._link(name) for name in self.services if name.startswith("draft-")]

    @property
    def front_address(self) -> str:
        """Return HOST:PORT of the link to the orchestrator."""
        return self._link("orchestrator")

    def build(self) -> None:
        """Make every service, to run on the host."""
        super().build()
        path = with_path(Path.cwd())["PYTHONPATH"]
        for name, service in self.services.items():
            service.command = self.host.command(service.command)
            service.environ |= self.clocks.environ(name, path)
            service.environ["XDG_CACHE_HOME"] = str(self.host.disk)

    def stop(self, *, timeout_s: float | None = None) -> None:
        """End the services, and what is between them."""
        super().stop(timeout_s=timeout_s)
        self._ends.close()

    def part(self, name: str, part: str) -> set[int]:
        """Return processes of a service: its engine, its front, or all; none if it has none now."""
        front = self.services[name].pid
        if front is None:
            return set()
        group = members_of({front})
        spawned = set(filter(is_spawned, group - {front}))
        match part:
            case "engine":
                return {oldest(spawned)} if spawned else set()
            case "front":
                return {front}
        return group

    def signal_part(self, name: str, part: str, number: int) -> None:
        """Send a signal to processes of a service, those that there are."""
        for pid in self.part(name, part):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def shared_here(self) -> list[Path]:
        """Return the files of live targets in shared memory, as this process sees them.

        None while a target that counts as ready does not answer.
        """
        with contextlib.suppress(grpc.RpcError):
            return [self.host.shared / file.relative_to(RING_DIR) for file in self.shared_files()]
        return []

    @contextlib.contextmanager
    def log_shown_if_it_fails(self) -> Iterator[None]:
        """Print what the services have written in the block, if it raises."""
        first_line = len(self.log)
        try:
            yield
        except BaseException:
            print(*self.log[first_line:], sep="\n")  # noqa: T201
            raise

    def check_nothing_left(self) -> None:
        """Check that shared memory, the disk and the processes are those of live services."""
        if not self.host.is_private:
            return
        wait_for(lambda: self._leftovers() == [], END_TIMEOUT_S, self._leftovers)

    def _leftovers(self) -> list[str]:
        owned = {path.name for path in self.shared_here()}
        files = {path.name for path in self.host.shared.iterdir()}
        fronts = {service.pid for service in self.services.values() if service.pid is not None}
        strays = {pid for pid in self.host.processes() - members_of(fronts) if is_alive(pid)}
        cached = [path.name for path in self.host.disk_from_here.rglob("*") if path.is_file()]
        return [
            *(f"/dev/shm/{name}" for name in files - owned),
            *(f"on disk: {name}" for name in cached if not name.endswith(".json")),
            *(f"process {pid}" for pid in strays),
        ]

    def _link(self, name: str) -> str:
        link = self.links.get(name)
        if link is None:
            address = self.services[name].address
            if name == LIAR:
                self.garbler, address = self._ends.enter_context(garbler(address))
            link = self.links[name] = self._make_link(address)
        return link.address


@contextlib.contextmanager
def harmed_stack(config: StackConfig) -> Iterator[HarmedStack]:
    """Run a stack for the length of the block; nothing of it is left after."""
    with private_host() as host, tcp_links() as links, clocks() as own_clocks:
        server = HarmedStack(config, host, links, own_clocks)
        with server:
            STARTED.append(server)
            try:
                yield server
            finally:
                with contextlib.suppress(ValueError):  # it was found to hold something
                    STARTED.remove(server)
                processes = server.processes()
        wait_for(lambda: not any(is_alive(pid) for pid in processes), END_TIMEOUT_S)
        server.check_nothing_left()
