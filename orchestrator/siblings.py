"""What orchestrator processes that share a port know of each other: whose requests each has."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
from collections.abc import MutableSequence
from ctypes import c_int64
from dataclasses import dataclass
from typing import cast

MAX_WORKERS = 64
"""Workers at which each process tells the others how many requests it has."""


def shared_words(count: int) -> MutableSequence[int]:
    """Return so many numbers, 0 at first, in memory that processes started later share."""
    words = multiprocessing.get_context("spawn").RawArray(c_int64, count)
    return cast(MutableSequence[int], words)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLoads:
    """How many requests each of the processes has at each worker: a table that each fills for
    itself, so that none waits for a lock.

    Args:
        index: Of this process.
        workers: [processes * MAX_WORKERS] words: the worker of an entry; 0: there is none.
        counts: Likewise: the requests.
    """

    index: int
    workers: MutableSequence[int]
    counts: MutableSequence[int]

    def note(self, address: str, num_requests: int) -> None:
        """Say how many requests this process has at a worker; one too many is left out."""
        own = range(self.index * MAX_WORKERS, (self.index + 1) * MAX_WORKERS)
        word = _word(address)
        place = self._find(own, word)
        if place is None and num_requests:
            home = own[word % MAX_WORKERS]
            place = next((place for place in (home, *own) if not self.counts[place]), None)
        if place is None:
            return
        if self.workers[place] != word:  # no count of another worker may be taken for this one's
            self.counts[place] = 0
            self.workers[place] = word
        self.counts[place] = num_requests

    def others(self, address: str) -> int:
        """Return the requests that the other processes have at a worker."""
        word = _word(address)
        found = 0
        for begin in range(0, len(self.workers), MAX_WORKERS):
            if begin != self.index * MAX_WORKERS:
                place = self._find(range(begin, begin + MAX_WORKERS), word)
                found += 0 if place is None else self.counts[place]
        return found

    def forget(self) -> None:
        """Say that this process has no requests anywhere: it has ended."""
        for place in range(self.index * MAX_WORKERS, (self.index + 1) * MAX_WORKERS):
            self.counts[place] = 0

    def _find(self, places: range, word: int) -> int | None:
        home = places[word % MAX_WORKERS]
        if self.workers[home] == word:
            return home
        try:
            return places.start + self.workers[places.start : places.stop].index(word)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """One of the processes, and the counts of all.

    Args:
        parent_pid: Of the process that started them.
        index: Of this one's count, which it alone writes while it runs.
        counts: Requests that each has admitted.
        holders: [processes * places] words: the tenants that hold the places of each; 0: nobody.
        loads: What each of them has at the workers.
        directory: Where each of them listens for the others, which nobody else can read.
    """

    parent_pid: int
    index: int
    counts: MutableSequence[int]
    holders: MutableSequence[int]
    loads: SharedLoads
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
        self.loads.forget()
        for place_idx in range(len(self._own_holders)):
            self.note_holder(place_idx, None)

    @property
    def _own_holders(self) -> range:
        num_places = len(self.holders) // len(self.counts)
        return range(self.index * num_places, (self.index + 1) * num_places)


@functools.lru_cache(maxsize=1024)
def _word(name: str) -> int:
    """Return a tenant or an address as 64 bits, none of which is 0 altogether."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1
