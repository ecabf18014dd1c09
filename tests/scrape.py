"""Read what processes tell Prometheus."""

from __future__ import annotations

import contextlib
import socket
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Scraped = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Scrape:
    """The samples of one moment.

    Args:
        text: As /metrics says it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: list[tuple[str, Mapping[str, str], float]] = [
            (sample.name, sample.labels, sample.value)
            for family in self.families.values()
            for sample in family.samples
        ]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of this name that have these labels; 0 without any."""
        return sum(
            value
            for other, its_labels, value in self.samples
            if other == name and labels.items() <= its_labels.items()
        )

    @property
    def names(self) -> set[str]:
        """Return the names of all samples."""
        return {name for name, _, _ in self.samples}


def num_refused(samples: Mapping[str, float], reason: str = "") -> float:
    """Return how many calls a server has turned away, for one reason or all."""
    return sum(
        value
        for key, value in samples.items()
        if key.startswith("coppice_calls_refused_total") and reason in key
    )


def scrape(url: str) -> Scrape:
    """Read /metrics of a process."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=20) as response:
        return Scrape(response.read().decode())


def free_ports(count: int) -> int:
    """Return the first of so many ports in a row that no other process is given meanwhile.

    A socket that does not listen holds each of them until this process ends. Services may listen
    there, one after the other; whoever asks for any free port gets another one.
    """
    while True:
        with contextlib.ExitStack() as stack:
            try:
                held = [stack.enter_context(_held(0))]
                port: int = held[0].getsockname()[1]
                held += [stack.enter_context(_held(port + i)) for i in range(1, count)]
            except (OSError, OverflowError):  # one of them is taken, or there are none so high
                continue
            for each in held:
                each.detach()
            return port


def _held(port: int) -> socket.socket:
    """Return a socket on a port that nobody has: others may listen there from now on."""
    held = socket.socket()
    try:
        held.bind(("127.0.0.1", port))
    except (OSError, OverflowError):
        held.close()
        raise
    # Set before, these would let two sockets hold one port.
    for shares in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        held.setsockopt(socket.SOL_SOCKET, shares, 1)
    return held
