"""Look at processes of this machine, and wait for what they do."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path


def wait_for(
    condition: Callable[[], bool],
    timeout_s: float = 180.0,
    describe: Callable[[], object] = lambda: "it never happened",
) -> None:
    """Wait until a condition holds; it fails the test if that takes too long.

    What takes long is looked at less often: many conditions ask processes that have work to do.
    """
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, describe()
        time.sleep(min(0.05, 0.01 + waited_s / 50))


def command(program: str) -> list[str]:
    """Return how to run this package's command: its script, or the module if it is not installed.

    A tree that is only on the path, as on a machine without a package index, has no script.
    """
    script = Path(sys.executable).parent / program
    return [str(script)] if script.exists() else [sys.executable, "-m", program]


def with_path(directory: Path) -> dict[str, str]:
    """Return this process's environment with a folder before all others on Python's path."""
    path = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie, which only its parent could reap, has ended."""
    return _stat(pid)[0] not in "ZX"


def is_spawned(pid: int) -> bool:
    """Return whether a process is one that multiprocessing spawned, as engines are."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def oldest(pids: Iterable[int]) -> int:
    """Return the process that started first. Raises: ValueError if there is none."""
    return min(pids, key=lambda pid: int(_stat(pid)[-1]))


def members_of(groups: set[int]) -> set[int]:
    """Return the running processes of these process groups."""
    return {pid for pid in all_processes() if int(_stat(pid)[2]) in groups and is_alive(pid)}


def children() -> set[int]:
    """Return the processes that this one has started and that still run."""
    return {pid for pid in all_processes() if int(_stat(pid)[1]) == os.getpid() and is_alive(pid)}


def all_processes() -> list[int]:
    """Return every process of this machine."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str]:
    """Return state, parent, process group and when it started, in ticks; those of nobody if there
    is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0", "0", "0"]
    fields = stat.rpartition(") ")[2].split()
    return [*fields[:3], fields[19]]
