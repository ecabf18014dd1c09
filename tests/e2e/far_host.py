"""A second host for tests: a network and a /dev/shm of its own, and a link to it that can be cut.

Both are namespaces, joined to this machine by two pairs of virtual interfaces: one for the
services, which is cut, and one for whoever supervises them, which is not.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from tests.e2e.private_host import PrivateHost, private_host

_BENCHMARK_NET = 198
"""Of RFC 2544: 198.18.0.0/15 is used by no network."""


class FarHost:
    """Processes there reach this machine, and it them, by two links.

    Args:
        holder: Pid of the process that keeps the network namespace.
        files: Its shared memory and disk.
        index: Of this host among those that there may be now, 0 to 16383.
    """

    def __init__(self, holder: int, files: PrivateHost, index: int) -> None:
        self.files = files
        self._holder = holder
        self.here, self.address = _addresses(18, index)
        """Of this machine and of that host, on the link that may be cut."""
        self._here_supervised, self.supervised_address = _addresses(19, index)
        """Where health is asked for: this link stays."""
        self._names = (f"coppice{index}d", f"coppice{index}s")

    def connect(self) -> None:
        """Make the links. Raises: CalledProcessError if this process may not."""
        pairs = (
            (self._names[0], self.here, self.address),
            (self._names[1], self._here_supervised, self.supervised_address),
        )
        for name, here, there in pairs:
            peer = f"peer name {name} netns {self._holder}"
            _ip(f"link add name {name} type veth {peer}".split())
            _ip(f"address add {here}/30 dev {name}".split())
            _ip(f"link set {name} up".split())
            self._ip_there(f"address add {there}/30 dev {name}")
            self._ip_there(f"link set {name} up")

    def disconnect(self) -> None:
        """Remove the links."""
        for name in self._names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(["link", "delete", name])

    def command(self, command: list[str]) -> list[str]:
        """Return how to run a command there, in the process that is started."""
        return [*self._enter(), *self.files.command(command)]

    @contextlib.contextmanager
    def cut_off(self) -> Iterator[None]:
        """Take the link of the services down for the length of the block."""
        self._ip_there(f"link set {self._names[0]} down")
        try:
            yield
        finally:
            self._ip_there(f"link set {self._names[0]} up")

    def _ip_there(self, arguments: str) -> None:
        _run([*self._enter(), "ip", *arguments.split()])

    def _enter(self) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._holder}/ns/net", "--"]


@contextlib.contextmanager
def far_host() -> Iterator[FarHost | None]:
    """Yield a second host, None if this process may not make one."""
    with private_host() as files, contextlib.ExitStack() as ends:
        if not files.is_private:
            yield None
            return
        holder = ends.enter_context(
            subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        assert holder.stdin is not None and holder.stdout is not None
        ends.callback(holder.stdin.close)
        host = FarHost(holder.pid, files, os.getpid() % 16384)
        ends.callback(host.disconnect)
        try:
            assert holder.stdout.readline() == b"ready\n", "no network namespace"
            host.connect()
        except (AssertionError, FileNotFoundError, subprocess.CalledProcessError):
            yield None
            return
        yield host


def _addresses(second: int, index: int) -> tuple[str, str]:
    """Return both ends of a link."""
    third, fourth = divmod(4 * index, 256)
    prefix = f"{_BENCHMARK_NET}.{second}.{third}"
    return f"{prefix}.{fourth + 1}", f"{prefix}.{fourth + 2}"


def _ip(arguments: list[str]) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
