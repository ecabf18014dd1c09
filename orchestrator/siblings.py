"""What orchestrator processes that share a port know of each other: how many requests each has."""

from __future__ import annotations

import multiprocessing
from collections.abc import MutableSequence
from ctypes import c_int64
from dataclasses import dataclass
from typing import cast


def shared_counts(num_processes: int) -> MutableSequence[int]:
    """Return a count per process, 0 at first, in memory that processes started later share."""
    counts = multiprocessing.get_context("spawn").RawArray(c_int64, num_processes)
    return cast(MutableSequence[int], counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """One of the processes, and the counts of all.

    Args:
        parent_pid: Of the process that started them.
        index: Of this one's count, which it alone writes while it runs.
        counts: Requests that each has admitted.
        directory: Where each of them listens for the others, which nobody else can read.
    """

    parent_pid: int
    index: int
    counts: MutableSequence[int]
    directory: str

    @property
    def address(self) -> str:
        """Return where this process listens for the others, for gRPC."""
        return self._address_of(self.index)

    @property
    def other_addresses(self) -> list[str]:
        """Return where the other processes listen, if they run."""
        others = (index for index in range(len(self.counts)) if index != self.index)
        return [self._address_of(index) for index in others]

    def _address_of(self, index: int) -> str:
        return f"unix:{self.directory}/{index}"

    @property
    def num_others(self) -> int:
        """Return the requests that the other processes have admitted."""
        return sum(self.counts) - self.counts[self.index]

    def note(self, num_requests: int) -> None:
        """Say how many requests this process has admitted."""
        self.counts[self.index] = num_requests
