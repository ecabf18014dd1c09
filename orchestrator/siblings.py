"""What orchestrator processes that share a port know of each other: whose requests each has."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import MutableSequence
from ctypes import c_int64
from dataclasses import dataclass
from typing import cast


def shared_words(count: int) -> MutableSequence[int]:
    """Return so many numbers, 0 at first, in memory that processes started later share."""
    words = multiprocessing.get_context("spawn").RawArray(c_int64, count)
    return cast(MutableSequence[int], words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """One of the processes, and the counts of all.

    Args:
        parent_pid: Of the process that started them.
        index: Of this one's count, which it alone writes while it runs.
        counts: Requests that each has admitted.
        holders: [processes * places] words: the tenants that hold the places of each; 0: nobody.
        directory: Where each of them listens for the others, which nobody else can read.
    """

    parent_pid: int
    index: int
    counts: MutableSequence[int]
    holders: MutableSequence[int]
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

    def num_others_of(self, tenant: str) -> int:
        """Return the requests of a tenant that the other processes have admitted."""
        own, word = self._own_holders, _word(tenant)
        return self.holders[: own.start].count(word) + self.holders[own.stop :].count(word)

    def note(self, num_requests: int) -> None:
        """Say how many requests this process has admitted."""
        self.counts[self.index] = num_requests

    def note_holder(self, place_idx: int, tenant: str | None) -> None:
        """Say whose one of this process's places is; None: nobody's."""
        self.holders[self._own_holders[place_idx]] = 0 if tenant is None else _word(tenant)

    def forget(self) -> None:
        """Say that this process holds nothing: it has ended."""
        self.note(0)
        for place_idx in range(len(self._own_holders)):
            self.note_holder(place_idx, None)

    @property
    def _own_holders(self) -> range:
        num_places = len(self.holders) // len(self.counts)
        return range(self.index * num_places, (self.index + 1) * num_places)


def _word(tenant: str) -> int:
    """Return a tenant as 64 bits, none of which is 0 altogether."""
    digest = hashlib.blake2b(tenant.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1
