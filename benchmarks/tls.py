"""What TLS, and the proof of who calls, cost a stream of tokens.

    python -m benchmarks.tls --messages 20000 --repeat 7 --output FILE

A server in another process streams TokenDelta messages of one token to a client, in plain text, by
TLS and by mutual TLS, in turn. CPU time is what counts, of both ends: unlike the time that passes,
other work on the machine hardly changes it. Identities are checked once per call, so their cost is
that of a call and not of a token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from benchmarks.machine import describe_machine
from coppice.v1 import generation_pb2 as pb
from shared.access.proofs import ProofCheck, prove
from shared.access.tls import ServerTls, Tls
from shared.access.tokens import TokenCheck
from shared.rpc.channel import open_channel
from shared.rpc.gate import Gate
from shared.rpc.server import RpcServer
from tests.certificates import Authority

SERVICE, METHOD = "coppice.benchmark.Tokens", "Stream"
WAYS = ("plain", "tls", "mutual")
_NUM_CHECKS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Microseconds of CPU per token: medians, of both ends together and of the server alone."""

    way: str
    cpu_us: float
    server_cpu_us: float
    more_than_plain_us: float


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=20_000, help="per stream")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        samples = asyncio.run(_measure(authority, arguments.messages, arguments.repeat))
        checks = _checks_us(Path(folder))
    results = _results(samples)
    for result in results:
        print(  # noqa: T201
            f"{result.way:8} {result.cpu_us:7.2f} us CPU per token, of the server "
            f"{result.server_cpu_us:.2f}; {result.more_than_plain_us:+.2f} us"
        )
    print(", ".join(f"{name} {value:.1f} us a call" for name, value in checks.items()))  # noqa: T201
    if arguments.output is not None:
        document = {
            "machine": describe_machine(),
            "messages": arguments.messages,
            "repeat": arguments.repeat,
            "results": [asdict(result) for result in results],
            "checks_us": checks,
        }
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


async def _measure(
    authority: Authority, num_messages: int, repeat: int
) -> dict[str, list[tuple[float, float]]]:
    """Return way -> (CPU seconds of both ends, of the server) of each stream."""
    front = authority.issue("front", hosts=("127.0.0.1",))
    client = authority.issue("client")
    fields: dict[str, dict[str, str]] = {
        "plain": {},
        "tls": {"cert_file": front.cert, "key_file": front.key},
        "mutual": {
            "cert_file": front.cert,
            "key_file": front.key,
            "client_ca_file": authority.file,
        },
    }
    shown = {
        "plain": None,
        "tls": Tls(ca_file=authority.file),
        "mutual": Tls(ca_file=authority.file, cert_file=client.cert, key_file=client.key),
    }
    samples: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        servers = {way: stack.enter_context(_server(fields[way])) for way in WAYS}
        for _ in range(repeat + 1):
            for way in WAYS:
                port, connection = servers[way]
                async with open_channel(f"127.0.0.1:{port}", tls=shown[way]) as channel:
                    samples[way].append(await _stream(channel, connection, num_messages))
    return {way: each[1:] for way, each in samples.items()}  # the first one warms up


async def _stream(
    channel: grpc.aio.Channel, connection: Connection, num_messages: int
) -> tuple[float, float]:
    call: Any = channel.unary_stream(
        f"/{SERVICE}/{METHOD}", response_deserializer=pb.GenerateResponse.FromString
    )
    await _receive(call, 1)  # connects
    server_s, client_s = _cpu_of(connection), time.process_time()
    await _receive(call, num_messages)
    own_s, server_s = time.process_time() - client_s, _cpu_of(connection) - server_s
    return own_s / num_messages, server_s / num_messages


async def _receive(call: Any, num_messages: int) -> None:
    """Check that every token comes, in order."""
    expected = 0
    async for response in call(str(num_messages).encode()):
        assert response.delta.token_offset == expected
        expected += 1
    assert expected == num_messages


@contextlib.contextmanager
def _server(fields: Mapping[str, str]) -> Iterator[tuple[int, Connection]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, fields), daemon=True)
    process.start()
    try:
        yield ours.recv(), ours
    finally:
        process.kill()
        process.join()


def _serve(connection: Connection, fields: Mapping[str, str]) -> None:
    asyncio.run(_serve_until_killed(connection, fields))


async def _serve_until_killed(connection: Connection, fields: Mapping[str, str]) -> None:
    gate = Gate(tls=ServerTls(**fields) if fields else None)
    server = RpcServer(services=[], host="127.0.0.1", port=0, gate=gate)
    handler = grpc.unary_stream_rpc_method_handler(
        _tokens, bytes.decode, pb.GenerateResponse.SerializeToString
    )
    handlers = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
    server.grpc_server.add_generic_rpc_handlers((handlers,))
    connection.send(await server.start())
    while True:
        await asyncio.to_thread(connection.recv)
        connection.send(time.process_time())


async def _tokens(request: str, context: Any) -> AsyncIterator[pb.GenerateResponse]:
    del context
    for offset in range(int(request)):
        delta = pb.TokenDelta(token_ids=[offset % 32000], token_offset=offset, text=" word")
        yield pb.GenerateResponse(delta=delta)


def _cpu_of(connection: Connection) -> float:
    connection.send(None)
    seconds: float = connection.recv()
    return seconds


def _results(samples: Mapping[str, list[tuple[float, float]]]) -> list[Result]:
    both = {
        way: statistics.median(own + server for own, server in each) * 1e6
        for way, each in samples.items()
    }
    return [
        Result(
            way=way,
            cpu_us=round(both[way], 2),
            server_cpu_us=round(statistics.median(s for _, s in samples[way]) * 1e6, 2),
            more_than_plain_us=round(both[way] - both["plain"], 2),
        )
        for way in WAYS
    ]


def _checks_us(folder: Path) -> dict[str, float]:
    """Return what it costs to check one call: a proof, made and checked; one of 100 tokens."""
    path = folder / "tokens"
    path.write_text("".join(f"name{index}:{index:032}\n" for index in range(100)))
    tokens, proofs = TokenCheck(str(path)), ProofCheck([b"k" * 32])
    return {
        "proof": _time_us(lambda: proofs.check("/a/B", prove(b"k" * 32, "/a/B"))),
        "one of 100 tokens": _time_us(lambda: tokens.check("/a/B", f"Bearer {50:032}")),
    }


def _time_us(call: Any) -> float:
    began = time.process_time()
    for _ in range(_NUM_CHECKS):
        call()
    return round((time.process_time() - began) / _NUM_CHECKS * 1e6, 1)


if __name__ == "__main__":
    main()
