"""What holds of services that are sent anything: nothing ends, grows, or calls it a bug."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from coppice import Client, Completion
from tests.e2e.serving import Server
from tests.marks import EXHAUSTIVE

SIZES = [120, pytest.param(10_000, marks=EXHAUSTIVE)]
"""How many messages are sent."""
PROMPT = [791, 675, 1686]
MAX_GROWTH_MIB = 48
INTERNAL = grpc.StatusCode.INTERNAL.value[0]


def good_request(server: Server, num_tokens: int = 24) -> Completion:
    """Send a request that is in order."""
    with Client(server.address) as client:
        return client.generate(token_ids=PROMPT, max_new_tokens=num_tokens, ignore_eos=True)


@contextlib.contextmanager
def unharmed(server: Server) -> Iterator[None]:
    """Check that no process is replaced or grows in the block, and that requests go on well."""
    expected = good_request(server).token_ids
    first_line = len(server.log)
    before = resident_mib(server)
    yield
    after = resident_mib(server)
    assert after.keys() == before.keys(), "a process has ended"
    grown = {pid: after[pid] - before[pid] for pid in after}
    assert max(grown.values()) < MAX_GROWTH_MIB, grown
    assert not [line for line in server.log[first_line:] if "Traceback" in line]
    assert good_request(server).token_ids == expected


def failures_in(response: type[Message], data: bytes) -> list[str]:
    """Return the failures of requests that a reply calls a bug of Coppice."""
    failures = getattr(response.FromString(data), "failures", [])
    return [failure.message for failure in failures if failure.code == INTERNAL]


def resident_mib(server: Server) -> dict[int, float]:
    """Return the memory that each process of the services has, MiB."""
    found = {}
    for pid in server.processes():
        status = Path(f"/proc/{pid}/status").read_text()
        found[pid] = int(status.partition("VmRSS:")[2].split()[0]) / 1024
    return found
