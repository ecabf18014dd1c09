"""What a server gives when far more is asked of it than it can do.

    python -m benchmarks.overload --output benchmarks/results/overload_cpu.json

Crowds: a stack with `--places` places; as many clients as places, then ten times as many, each with
one request after the other, which come again when they are told to. What was served whole counts.
Prompts: a short request, alone and beside six clients that send one long prompt after the other.
Every output is compared with the one that an idle server gives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from coppice import AsyncClient, TokenDelta
from coppice.stack.config import stack_config
from shared.config import OrchestratorConfig
from shared.errors import ResourceExhaustedError
from tests.e2e.serving import Server
from tests.scrape import Scrape, free_ports

PROMPT = "def read_config(path):\n"
LONG_TOKENS, NUM_LONG = 1900, 6
_WAIT_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdRow:
    """So many clients at once.

    Args:
        requests_per_s: Served whole, until the time was up.
        refusals_per_request: Of those that were served.
        num_given_up: Requests whose client was refused too often.
        latency_p50_s, latency_p99_s: From the first try to the last token.
    """

    num_clients: int
    requests_per_s: float
    refusals_per_request: float
    num_given_up: int
    latency_p50_s: float
    latency_p99_s: float
    identical: bool


def main() -> None:
    """Measure what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument("--times", default="1,10", help="clients for each place, comma-separated")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each crowd")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--shorts", type=int, default=30, help="short requests of each kind")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    document = {**describe_machine(), "load_average": os.getloadavg()[0]}
    metrics_port = free_ports(1)
    orchestrator = OrchestratorConfig(
        host="127.0.0.1", port=0, max_num_requests=arguments.places, metrics_port=metrics_port
    )
    given = {"device": "cpu", "num_drafts": 1, "port": 0}
    server = Server(stack_config(given, orchestrator=orchestrator))
    with server:
        server.wait_paired()
        counts = [arguments.places * int(text) for text in arguments.times.split(",")]
        crowds = asyncio.run(measure_crowds(server.address, metrics_port, counts, arguments))
        prompts = asyncio.run(measure_prompts(server.address, arguments.shorts))
    document |= {"crowds": [asdict(row) for row in crowds], "prompts": prompts}
    print(json.dumps(document, indent=1))  # noqa: T201
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    if not (prompts["identical"] and all(row.identical for row in crowds)):
        sys.exit("load changed an output: that is a bug")


async def measure_crowds(
    address: str, metrics_port: int, counts: Sequence[int], arguments: argparse.Namespace
) -> list[CrowdRow]:
    """Serve crowds of clients, one after the other."""
    options: dict[str, Any] = {"max_new_tokens": arguments.new_tokens, "ignore_eos": True}
    rows = []
    async with AsyncClient(address) as client:
        plain = (await client.generate(PROMPT, speculation=False, **options)).token_ids
        for count in counts:
            served: list[float] = []  # seconds of each request that came in time
            wrong: list[tuple[int, ...]] = []
            given_up: list[str] = []
            end_s = time.monotonic() + arguments.seconds

            async def call_on(
                end_s: float = end_s,
                served: list[float] = served,
                wrong: list[tuple[int, ...]] = wrong,
                given_up: list[str] = given_up,
            ) -> None:
                while (began_s := time.monotonic()) < end_s:
                    try:
                        done = await client.generate(PROMPT, **options)
                    except ResourceExhaustedError as error:
                        given_up.append(error.reason)
                        continue
                    if time.monotonic() < end_s:
                        served.append(time.monotonic() - began_s)
                    if done.token_ids != plain:
                        wrong.append(done.token_ids)

            before = _num_refusals(metrics_port)
            await asyncio.gather(*(call_on() for _ in range(count)))
            refused = _num_refusals(metrics_port) - before
            rows.append(
                CrowdRow(
                    num_clients=count,
                    requests_per_s=round(len(served) / arguments.seconds, 2),
                    refusals_per_request=round(refused / max(len(served), 1), 2),
                    num_given_up=len(given_up),
                    latency_p50_s=round(statistics.median(served), 2),
                    latency_p99_s=round(statistics.quantiles(served, n=100)[98], 2),
                    identical=not wrong,
                )
            )
    return rows


async def measure_prompts(address: str, count: int) -> dict[str, Any]:
    """Return the times to the first token of short requests, alone and beside long prompts."""
    async with AsyncClient(address) as client:
        alone_s, alone = await _short_requests(client, count)
        is_over = asyncio.Event()

        async def read_long(seed: int) -> None:
            turn = 0
            while not is_over.is_set():
                turn += 1
                ids = [(7 * seed + 31 * turn + 13 * i) % 4000 + 1 for i in range(LONG_TOKENS)]
                await client.generate(token_ids=ids, max_new_tokens=4, ignore_eos=True)

        readers = [asyncio.create_task(read_long(seed)) for seed in range(NUM_LONG)]
        await asyncio.sleep(1.0)
        beside_s, beside = await _short_requests(client, count)
        is_over.set()
        await asyncio.gather(*readers)
    medians = statistics.median(alone_s), statistics.median(beside_s)
    return {
        "num_requests": count,
        "alone_first_ms": round(medians[0] * 1e3, 1),
        "beside_first_ms": round(medians[1] * 1e3, 1),
        "beside_first_p90_ms": round(statistics.quantiles(beside_s, n=10)[8] * 1e3, 1),
        "ratio": round(medians[1] / medians[0], 2),
        "identical": alone == beside,
    }


async def _short_requests(
    client: AsyncClient, count: int
) -> tuple[list[float], list[tuple[int, ...]]]:
    """Return the time to the first token, and the output, of requests one after the other."""
    times, outputs = [], []
    for _ in range(count):
        began, first_s = time.perf_counter(), 0.0
        ids: list[int] = []
        async for event in client.stream(PROMPT, max_new_tokens=8, ignore_eos=True):
            if isinstance(event, TokenDelta):
                first_s = first_s or time.perf_counter() - began
                ids += event.token_ids
        times.append(first_s)
        outputs.append(tuple(ids))
        await asyncio.sleep(_WAIT_S)
    return times, outputs


def _num_refusals(metrics_port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=20) as answer:
        return Scrape(answer.read().decode()).value("coppice_refusals_total")


if __name__ == "__main__":
    main()
