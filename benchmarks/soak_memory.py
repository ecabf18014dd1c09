"""Memory, file descriptors and threads of the processes of a stack over time, and their slopes.

Two sizes are judged: what is resident (RSS), and the anonymous part of that, which is all that the
process has allocated itself. The rest of RSS is pages of files, libraries for the most part, as far
as they were touched: no more than those files have. What the process has for itself (USS) is no
measure of growth, for it counts such pages, and those of a fork's parent, from the moment at which
the last other process that maps them ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.serving import Server
from tests.processes import is_spawned, members_of, oldest

INTERVAL_S = 10.0
CLIENTS = "clients"
MAX_GROWTH = 0.01
"""An hour, of a process's mean."""
ALLOCATOR_MIB = 1.0
"""An hour, on top: pages that allocators of C, Python and torch take and keep."""
MAX_MORE = 2.0
"""File descriptors or threads, last quarter against first: connections come and go."""
_SIZES = ("rss_mib", "anonymous_mib")
_COUNTS = ("num_fds", "num_threads")
_MIB = float(1 << 20)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True, kw_only=True)
class Life:
    """One process, from its first sample to its last.

    Args:
        role: Service and part, such as "target-0 engine" or "orchestrator worker".
        samples: (time s since the start, RSS MiB, anonymous MiB, file descriptors, threads).
        cpu_s: Used until the last sample, seconds.
    """

    pid: int
    role: str
    samples: list[tuple[float, float, float, int, int]] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def length_s(self) -> float:
        """Return for how long it was seen."""
        return self.samples[-1][0] - self.samples[0][0]

    def summary(self, warm_up_s: float) -> dict[str, Any] | None:
        """Return slopes and means of what came after its first `warm_up_s`; None if too little."""
        begin_s = self.samples[0][0] + warm_up_s
        kept = np.array([sample for sample in self.samples if sample[0] >= begin_s], dtype=float)
        if len(kept) < 8:
            return None
        quarter = len(kept) // 4
        result: dict[str, Any] = {
            "role": self.role,
            "pid": self.pid,
            "minutes": round(self.length_s / 60, 1),
        }
        for column, name in enumerate((*_SIZES, *_COUNTS), start=1):
            values = kept[:, column]
            result[name] = {
                "first_quarter": round(float(values[:quarter].mean()), 2),
                "last_quarter": round(float(values[-quarter:].mean()), 2),
                "max": round(float(values.max()), 2),
                "slope_per_hour": round(3600 * _slope(kept[:, 0], values), 3),
            }
        return result

    def per_minute(self) -> list[list[float]]:
        """Return minute, median RSS and median anonymous part, MiB."""
        rows: dict[int, list[tuple[float, float]]] = {}
        for at_s, rss, anonymous, _, _ in self.samples:
            rows.setdefault(int(at_s // 60), []).append((rss, anonymous))
        return [
            [minute, *(round(float(m), 2) for m in np.median(values, axis=0))]
            for minute, values in rows.items()
        ]


def growth(summary: dict[str, Any]) -> list[str]:
    """Return what of a process is not flat, in words; that of the clients keeps all results."""
    found: list[str] = []
    if summary["role"] == CLIENTS:
        return found
    for name in _SIZES:
        part = summary[name]
        mean = (part["first_quarter"] + part["last_quarter"]) / 2
        limit = MAX_GROWTH * mean + ALLOCATOR_MIB
        if part["slope_per_hour"] > limit:
            found.append(f"{name} grows by {part['slope_per_hour']} an hour, limit {limit:.2f}")
    for name in _COUNTS:
        part = summary[name]
        if part["last_quarter"] > part["first_quarter"] + MAX_MORE:
            found.append(f"{name} was {part['first_quarter']}, is {part['last_quarter']}")
    return [f"{summary['role']} ({summary['pid']}): {text}" for text in found]


class Sampler:
    """Reads /proc for every process of a stack, and for this one, which has the clients."""

    def __init__(self, stack: Server) -> None:
        self._stack = stack
        self._began_s = time.monotonic()
        self._lives: dict[int, Life] = {}
        self.lives: list[Life] = []
        """All that were seen, also those that have ended."""

    @property
    def cores(self) -> float:
        """Return the cores that the services used on average."""
        used_s = sum(life.cpu_s for life in self.lives if life.role != CLIENTS)
        return used_s / (time.monotonic() - self._began_s)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample for the length of the block."""
        is_over = threading.Event()

        def sample() -> None:
            while not is_over.wait(INTERVAL_S):
                self._sample()

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _sample(self) -> None:
        now_s = time.monotonic() - self._began_s
        seen = {os.getpid(): CLIENTS}
        for name, service in self._stack.services.items():
            front = service.pid
            if front is not None:
                seen |= {pid: f"{name} {part}" for pid, part in _parts(name, front).items()}
        lives = {}
        for pid, role in seen.items():
            with contextlib.suppress(OSError, ValueError, IndexError):
                life = self._lives.get(pid)
                if life is None or life.role != role:
                    life = Life(pid=pid, role=role)
                rss, anonymous = _memory(pid)
                num_fds = len(os.listdir(f"/proc/{pid}/fd"))
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
                life.cpu_s = (int(stat[11]) + int(stat[12])) / _TICKS
                life.samples.append((round(now_s, 1), rss, anonymous, num_fds, int(stat[17])))
                if len(life.samples) == 1:
                    self.lives.append(life)
                lives[pid] = life
        self._lives = lives


def _parts(service: str, front: int) -> dict[int, str]:
    """Return the processes of a service by what they are."""
    parts = dict.fromkeys(members_of({front}), "helper")
    spawned = set(filter(is_spawned, parts.keys() - {front}))
    if service.startswith("orchestrator"):
        parts |= dict.fromkeys(spawned, "worker")
    elif spawned:
        parts |= dict.fromkeys(spawned, "spare engine")
        parts[oldest(spawned)] = "engine"
    return {**parts, front: "front"}


def _memory(pid: int) -> tuple[float, float]:
    """Return RSS and its anonymous part, MiB. Raises: OSError if the process has ended."""
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, _ = line.split()
        sizes[name] = int(value) * 1024 / _MIB
    return round(sizes["Rss:"], 2), round(sizes["Anonymous:"], 2)


def _slope(times: np.ndarray, values: np.ndarray) -> float:
    """Return the median slope of all pairs of samples (Theil-Sen), per second."""
    later, earlier = np.triu_indices(len(times), k=1)[::-1]
    gaps = times[later] - times[earlier]
    return float(np.median((values[later] - values[earlier]) / gaps))
