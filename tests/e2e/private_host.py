"""A machine of its own for a stack under test, whose small /dev/shm and small disk may be filled.

Both are file systems in memory that exist in one mount namespace only; processes are started in it
with `nsenter`. Where that is not allowed the stack shares the machine's /dev/shm, and nothing is
filled.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shared.peer.shared_files import RING_DIR
from tests.processes import all_processes

SHARED_MIB = 48
DISK_KIB = 256
_SET_UP = f"""
mount -t tmpfs -o size={SHARED_MIB}m,mode=1777 shared {RING_DIR} &&
mount -t tmpfs -o size={DISK_KIB}k disk "$1" && echo ready && exec cat
"""


class PrivateHost:
    """Where processes see a /dev/shm and a disk that no other process sees.

    Args:
        holder: Pid of the process that keeps the namespace; None: everything is the machine's own.
        disk: Folder on which the small disk is mounted.
    """

    def __init__(self, holder: int | None, disk: Path) -> None:
        self.is_private = holder is not None
        self.disk = disk
        """As the processes of this host see it."""
        self._holder = holder

    @property
    def shared(self) -> Path:
        """Return this host's /dev/shm, as this process sees it."""
        return self._seen(RING_DIR)

    @property
    def disk_from_here(self) -> Path:
        """Return this host's disk, as this process sees it."""
        return self._seen(self.disk)

    def command(self, command: list[str]) -> list[str]:
        """Return how to run a command there, in the process that is started."""
        if not self.is_private:
            return command
        return ["nsenter", f"--mount=/proc/{self._holder}/ns/mnt", "--", *command]

    def processes(self) -> set[int]:
        """Return every process that runs there; none if this is the machine."""
        if not self.is_private:
            return set()
        own = os.readlink(f"/proc/{self._holder}/ns/mnt")
        return {pid for pid in all_processes() if _mount_namespace(pid) == own} - {self._holder}

    @contextlib.contextmanager
    def filled(self, directory: Path) -> Iterator[None]:
        """Leave no room in one of the small file systems for the length of the block."""
        assert self.is_private, "nobody may fill the machine's own"
        ballast = directory / "ballast"
        try:
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            yield
        finally:
            ballast.unlink(missing_ok=True)

    def _seen(self, path: Path) -> Path:
        if not self.is_private:
            return path
        return Path(f"/proc/{self._holder}/root") / path.relative_to("/")


@contextlib.contextmanager
def private_host() -> Iterator[PrivateHost]:
    """Yield a host of its own if this process may make one, else the machine."""
    with tempfile.TemporaryDirectory() as disk:
        try:
            holder = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", _SET_UP, "sh", disk],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except FileNotFoundError:
            yield PrivateHost(None, Path(disk))
            return
        with holder:
            assert holder.stdout is not None and holder.stdin is not None
            is_private = holder.stdout.readline() == b"ready\n"
            yield PrivateHost(holder.pid if is_private else None, Path(disk))
            holder.stdin.close()


def _mount_namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/mnt")
    return ""
