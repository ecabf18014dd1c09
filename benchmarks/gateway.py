"""What the HTTP gateway costs: per request and per event of a stream, beside gRPC itself.

    python -m benchmarks.gateway --streams 1,8,32,128 --requests 256 --output FILE

Three processes: a source that answers `Generate` without a model, as fast as it is read, in deltas
of three tokens, as speculation gives them; the gateway, as `coppice serve gateway` runs it; and
this one, which reads. The cost is the CPU time of the gateway's process, which other work on the
machine changes less than times; a request's own cost is measured by requests of one token. How
many streams a core carries follows from it, for streams of 20 events per second each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from benchmarks.machine import describe_machine
from coppice import AsyncClient
from coppice.v1 import generation_pb2 as pb
from coppice.v1 import generation_pb2_grpc as pb_grpc
from shared.rpc.health_names import ORCHESTRATOR_SERVICE

TOKENS_PER_EVENT = 3
EVENTS_PER_S = 20
_TEXT = " some text"
_START_TIMEOUT_S = 60.0
_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s"
)


class _Source(pb_grpc.GenerationServiceServicer):
    """Answers with the same tokens always."""

    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        card = pb.ModelCard(name="m", max_context_len=1 << 20, vocab_size=1000, has_tokenizer=True)
        return pb.ListModelsResponse(models=[card])

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        count = request.stopping.max_new_tokens
        info = pb.PromptInfo(request_id="r", model="m", num_prompt_tokens=5, seed=1)
        yield pb.GenerateResponse(prompt_info=info)
        for offset in range(0, count, TOKENS_PER_EVENT):
            ids = range(offset, min(count, offset + TOKENS_PER_EVENT))
            delta = pb.TokenDelta(token_offset=offset, token_ids=ids, text=_TEXT)
            yield pb.GenerateResponse(delta=delta)
        finish = pb.FinishInfo(reason=pb.FINISH_REASON_LENGTH)
        finish.usage.num_output_tokens = count
        yield pb.GenerateResponse(finish=finish)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One number of streams at a time.

    Args:
        cpu_us_per_event: Of the gateway; the requests' own cost is taken off.
        events_per_s: Of all streams together.
        first_ms, grpc_first_ms: Median time to the first event, by HTTP and by gRPC.
        grpc_events_per_s: The same streams read by this process without the gateway.
    """

    num_streams: int
    cpu_us_per_event: float
    cpu_us_per_token: float
    events_per_s: float
    grpc_events_per_s: float
    first_ms: float
    grpc_first_ms: float


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,8,32,128", help="at a time")
    parser.add_argument("--requests", type=int, default=256, help="of each cell")
    parser.add_argument("--new-tokens", type=int, default=256, help="of each request")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with _source() as source, _gateway(source) as (port, pid):
        document = asyncio.run(_measure(arguments, source, port, pid))
    print(json.dumps(document, indent=1))  # noqa: T201
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


async def _measure(
    arguments: argparse.Namespace, source: str, port: int, pid: int
) -> dict[str, Any]:
    counts = [int(text) for text in arguments.streams.split(",")]
    count = arguments.requests
    await _read_http(port, num_streams=8, num_requests=64, new_tokens=8)  # warm up
    before = _cpu_s(pid)
    await _read_http(port, num_streams=8, num_requests=count, new_tokens=1)
    request_us = (_cpu_s(pid) - before) / count * 1e6
    cells = []
    for num_streams in counts:
        options = {"num_streams": num_streams, "num_requests": count}
        options["new_tokens"] = arguments.new_tokens
        before, began = _cpu_s(pid), time.perf_counter()
        first_s = await _read_http(port, **options)
        took_s, cpu_s = time.perf_counter() - began, _cpu_s(pid) - before
        began = time.perf_counter()
        grpc_first_s = await _read_grpc(source, **options)
        grpc_took_s = time.perf_counter() - began
        num_events = count * -(-arguments.new_tokens // TOKENS_PER_EVENT)
        event_us = (cpu_s * 1e6 - request_us * count) / num_events
        cells.append(
            Cell(
                num_streams=num_streams,
                cpu_us_per_event=round(event_us, 1),
                cpu_us_per_token=round(event_us * num_events / count / arguments.new_tokens, 1),
                events_per_s=round(num_events / took_s),
                grpc_events_per_s=round(num_events / grpc_took_s),
                first_ms=round(statistics.median(first_s) * 1e3, 2),
                grpc_first_ms=round(statistics.median(grpc_first_s) * 1e3, 2),
            )
        )
    costs_us = [max(cell.cpu_us_per_event, 1.0) for cell in cells]  # a short run may see none
    return {
        "machine": describe_machine(),
        "load_average": os.getloadavg()[0],
        "requests": count,
        "new_tokens": arguments.new_tokens,
        "tokens_per_event": TOKENS_PER_EVENT,
        "cpu_us_per_request": round(request_us),
        "cells": [asdict(cell) for cell in cells],
        "streams_per_core": {
            "events_per_s_of_each": EVENTS_PER_S,
            "from": int(1e6 / (max(costs_us) * EVENTS_PER_S)),
            "to": int(1e6 / (min(costs_us) * EVENTS_PER_S)),
        },
    }


async def _read_http(
    port: int, *, num_streams: int, num_requests: int, new_tokens: int
) -> list[float]:
    """Read streams by HTTP, so many at a time; return the times to their first events."""
    body = {"model": "m", "prompt": "x", "max_tokens": new_tokens, "stream": True}
    data = json.dumps(body).encode()
    todo = iter(range(num_requests))
    first_s: list[float] = []

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        for _ in todo:
            began = time.perf_counter()
            writer.write(_HEAD % (len(data), data))
            await reader.readuntil(b"data: ")
            first_s.append(time.perf_counter() - began)
            await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        writer.close()

    await asyncio.gather(*(work() for _ in range(num_streams)))
    return first_s


async def _read_grpc(
    address: str, *, num_streams: int, num_requests: int, new_tokens: int
) -> list[float]:
    """Read the same streams without the gateway."""
    todo = iter(range(num_requests))
    first_s: list[float] = []
    async with AsyncClient(address) as client:

        async def work() -> None:
            for _ in todo:
                began = time.perf_counter()
                is_first = True
                async for event in client.stream("x", max_new_tokens=new_tokens):
                    if is_first and event.text:
                        first_s.append(time.perf_counter() - began)
                        is_first = False

        await asyncio.gather(*(work() for _ in range(num_streams)))
    return first_s


@contextlib.contextmanager
def _source() -> Iterator[str]:
    """Run the source; yield its address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve_source, args=(there,), daemon=True)
    process.start()
    try:
        yield f"127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()


def _serve_source(pipe: Connection) -> None:
    asyncio.run(_serve_forever(pipe))


async def _serve_forever(pipe: Connection) -> None:
    server = grpc.aio.server()
    pb_grpc.add_GenerationServiceServicer_to_server(_Source(), server)
    servicer = health.aio.HealthServicer()
    await servicer.set(ORCHESTRATOR_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(port)
    await server.wait_for_termination()


@contextlib.contextmanager
def _gateway(source: str) -> Iterator[tuple[int, int]]:
    """Run the gateway; yield its port and its process."""
    command = [sys.executable, "-m", "coppice", "serve", "gateway", "--port=0"]
    process = subprocess.Popen(
        [*command, f"--orchestrators={source}", "--max-num-requests=4096"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = ""
        while "listening on port " not in line:
            line = process.stderr.readline()
            if not line:
                raise RuntimeError("the gateway ended before it listened")
        with open(os.devnull, "w") as nowhere:
            reader = subprocess.Popen(["cat"], stdin=process.stderr, stdout=nowhere)
            try:
                yield int(line.partition("listening on port ")[2].partition(",")[0]), process.pid
            finally:
                process.terminate()
                process.wait(_START_TIMEOUT_S)
                reader.wait()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
