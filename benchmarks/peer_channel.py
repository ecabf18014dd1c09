"""What the peer channel costs a round, by the local socket, over TCP, and across a delay.

    python -m benchmarks.peer_channel --requests 1,8,32 --delay-ms 0.1 --output FILE

A target's end sends a PathBatch with feature rows, a draft's end in another process reads the rows
and sends a TreeBatch: a round without the engines' work. The rows lie in the feature ring where
both ends share memory, or else in the message. `proxy` is TCP by way of a process that forwards
bytes, each direction after a delay; without a delay it shows what the forwarding itself costs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import secrets
import select
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine
from draft_service.features import FeatureReader
from shared.messages import PathBatch, PathEntry, PathRows, TreeBatch, TreeShape
from shared.peer.channel import PeerChannel, PeerChannels, PeerListener, PeerLost, connect
from shared.peer.ring import FeatureRing
from shared.peer.tcp import PeerAddress, TcpDialer, TcpListener

_SHAPE = TreeShape(num_steps=3, topk=1, num_draft_tokens=4)
_NUM_CHECKED = 20
_MANY_CORES = 4
_TIMEOUT_S = 30.0
WAYS = ("socket", "tcp", "proxy", "delay")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a round carries, and how ends wait for it.

    Args:
        num_tokens: Accepted of each request: rows.
        width: Values of a row, of 2 bytes.
        spins: Ends look for messages without sleeping, as engines beside a GPU do.
    """

    num_requests: int
    num_tokens: int
    width: int
    spins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Milliseconds of a round, from the path to the trees."""

    way: str
    num_requests: int
    p50_ms: float
    p99_ms: float
    more_than_socket_ms: float


def receive(
    channels: PeerChannels, channel: PeerChannel | None, *, spins: bool
) -> tuple[PeerChannel, Any]:
    """Return the next message and where it comes from.

    Args:
        channel: None: any; those that end at once are of targets that look for dead sockets.
    Raises: ConnectionError if the channel is lost, or nothing comes.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        for source, message in channels.receive():
            if not isinstance(message, PeerLost):
                return source, message
            if source is channel:
                raise ConnectionError("the channel is lost")
        if not spins:
            poller = select.poll()
            for fd, events in channels.events.items():
                poller.register(fd, events)
            poller.poll(1e3)
        channels.flush()
    raise ConnectionError("nothing comes")


def run_draft(name: str | PeerAddress, keys: tuple[bytes, ...], load: Load) -> None:
    """Answer every path with trees until the channel ends; the first ones say what was read."""
    channel = connect(name) if isinstance(name, str) else None
    dialled: list[PeerChannel | None] = []
    dialer = TcpDialer(keys, lambda _, opened: dialled.append(opened))
    channels = PeerChannels(dialer)
    if isinstance(name, PeerAddress):
        dialer.dial(name)
        while not dialled:
            channels.receive()
        (channel,) = dialled
    elif channel is not None:
        channels.add(channel)
    if channel is None:
        raise ConnectionError("no channel")
    channel.put(trees_of(load, 0, 0))
    channel.flush()
    reader = FeatureReader(load.width)
    with contextlib.suppress(ConnectionError):
        while True:
            _, batch = receive(channels, channel, spins=load.spins)
            rows = reader.read(batch.rows)
            assert rows is not None
            round_idx = batch.parts[0].round_idx
            is_checked = round_idx <= _NUM_CHECKED
            digest = zlib.crc32(rows.data.tobytes()) & 0x7FFFFFFF if is_checked else 0
            channel.put(trees_of(load, round_idx, digest))
            channel.flush()


def trees_of(load: Load, round_idx: int, digest: int) -> TreeBatch:
    """Return a chain of 4 nodes per request."""
    count, nodes = load.num_requests, _SHAPE.num_draft_tokens
    return TreeBatch(
        request_ids=[f"bench-0123456789abcdef-{i}" for i in range(count)],
        target_epochs=[1] * count,
        draft_epochs=[1] * count,
        round_idx=[round_idx] * count,
        seq_lens=[1000] * count,
        num_nodes=[nodes] * count,
        token_ids=[digest, 2, 3, 4] * count,
        parent_index=[-1, 0, 1, 2] * count,
    )


class Target:
    """A target's end, and the rows that it has computed."""

    def __init__(self, channel: PeerChannel, channels: PeerChannels, load: Load) -> None:
        self._channel, self._channels, self._load = channel, channels, load
        num_rows = load.num_requests * load.num_tokens
        self._rows = np.random.default_rng(1).integers(
            0, 255, (num_rows, 2 * load.width), dtype=np.uint8
        )
        self._shape = (num_rows, load.width)
        self._ring = FeatureRing(max(64 * self._rows.nbytes, 1 << 20))
        self._digest = zlib.crc32(self._rows.tobytes()) & 0x7FFFFFFF

    def run_round(self, round_idx: int) -> float:
        """Return the milliseconds from the path to the trees."""
        load = self._load
        began = time.perf_counter()
        tokens = list(range(load.num_tokens))
        parts = tuple(
            PathEntry(f"bench-0123456789abcdef-{i}", 1, 1, round_idx, 1000, tokens)
            for i in range(load.num_requests)
        )
        self._put(parts)
        self._channel.flush()
        _, batch = receive(self._channels, self._channel, spins=load.spins)
        took_ms = 1e3 * (time.perf_counter() - began)
        assert batch.round_idx == [round_idx] * load.num_requests
        if round_idx <= _NUM_CHECKED:
            assert batch.token_ids[0] == self._digest, "the rows are not those that were sent"
        self._ring.start_step()
        return took_ms

    def close(self) -> None:
        """Remove the ring."""
        self._ring.close()

    def _put(self, parts: tuple[PathEntry, ...]) -> None:
        rows, prepare = self._place()
        self._channel.put(PathBatch(parts=parts, shape=_SHAPE, rows=rows), prepare=prepare)

    def _place(self) -> tuple[PathRows, Callable[[], None] | None]:
        if not self._channel.shares_memory:
            return PathRows(shape=self._shape, dtype="bfloat16", data=self._rows.tobytes()), None
        span = self._ring.claim(self._rows.nbytes)
        assert span is not None
        rows = PathRows(shape=self._shape, dtype="bfloat16", data=span)
        return rows, lambda: self._ring.fill(span, [self._rows])


def forward(ready: Connection, target: tuple[str, int], delay_s: float) -> None:
    """Forward the bytes of one connection, each direction after a delay; spins while it delays."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ready.send(server.getsockname()[1])
        near, _ = server.accept()
    far = socket.create_connection(target)
    ends = {near: far, far: near}
    waiting: dict[socket.socket, deque[tuple[float, bytes]]] = {near: deque(), far: deque()}
    for sock in ends:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        is_idle = not any(waiting.values())
        readable, _, _ = select.select(list(ends), [], [], None if is_idle else 0)
        for sock in readable:
            data = sock.recv(1 << 18)
            if not data:
                return
            waiting[ends[sock]].append((time.perf_counter() + delay_s, data))
        for sock, queue in waiting.items():
            while queue and queue[0][0] <= time.perf_counter():
                sock.sendall(queue.popleft()[1])


@contextlib.contextmanager
def process(function: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Run a function in another process for the length of the block."""
    child = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    child.start()
    try:
        yield
    finally:
        child.terminate()
        child.join()


@contextlib.contextmanager
def opened(way: str, load: Load, delay_s: float) -> Iterator[Target]:
    """Open a channel to a draft's end in another process."""
    keys = (secrets.token_bytes(32),)
    with contextlib.ExitStack() as stack:
        listener = PeerListener() if way == "socket" else TcpListener("127.0.0.1", 0, keys)
        stack.callback(listener.close)
        name: str | PeerAddress
        if isinstance(listener, PeerListener):
            name = listener.name
        else:
            name = PeerAddress.parse(listener.address, worker_address="")
            if way != "tcp":
                ours, theirs = multiprocessing.Pipe()
                real = (name.host, name.port)
                stack.enter_context(
                    process(forward, theirs, real, delay_s if way == "delay" else 0.0)
                )
                name = name._replace(port=ours.recv())
        stack.enter_context(process(run_draft, name, keys, load))
        channels = PeerChannels(listener)
        channel, _ = receive(channels, None, spins=False)
        stack.callback(channel.close)
        target = Target(channel, channels, load)
        stack.callback(target.close)
        yield target


def measure(load: Load, num_rounds: int, repeat: int, delay_s: float) -> list[Result]:
    """Measure all ways in turn, again and again, so that they share what else the machine does."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeat):
        for way in WAYS:
            with opened(way, load, delay_s) as target:
                for round_idx in range(1, _NUM_CHECKED + num_rounds + 1):
                    took_ms = target.run_round(round_idx)
                    if round_idx > _NUM_CHECKED:
                        times[way].append(took_ms)
    base = float(np.median(times["socket"]))
    return [
        Result(
            way=way,
            num_requests=load.num_requests,
            p50_ms=float(np.median(took)),
            p99_ms=float(np.percentile(took, 99)),
            more_than_socket_ms=float(np.median(took)) - base,
        )
        for way, took in times.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", default="1,8,32", help="requests of a round")
    parser.add_argument("--tokens", type=int, default=3, help="accepted of each request")
    parser.add_argument("--width", type=int, default=4096, help="values of a feature row, bfloat16")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=0.1, help="in each direction")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    spins = len(os.sched_getaffinity(0)) >= _MANY_CORES
    rows = []
    print("| requests | way | p50 ms | p99 ms | more than socket, ms |")  # noqa: T201
    print("|---|---|---|---|---|")  # noqa: T201
    for num_requests in map(int, options.requests.split(",")):
        load = Load(
            num_requests=num_requests,
            num_tokens=options.tokens,
            width=options.width,
            spins=spins,
        )
        for result in measure(load, options.rounds, options.repeat, options.delay_ms / 1e3):
            rows.append(asdict(result))
            print(  # noqa: T201
                f"| {result.num_requests} | {result.way} | {result.p50_ms:.3f} "
                f"| {result.p99_ms:.3f} | {result.more_than_socket_ms:+.3f} |",
                flush=True,
            )
    if options.output:
        report = {**describe_machine(), "spins": spins, "rows": rows}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
