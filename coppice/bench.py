"""Measure a running server: throughput and latency by concurrency and mode.

A cell is a mode (plain, or a tree shape) at a concurrency: as many requests at a time, each worker
taking the next prompt when its last one is done. Modes see the same prompts with the same seeds, so
their outputs must be equal; that is counted too.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coppice.client import AsyncClient
from shared.messages import FinishInfo, TokenDelta

# A prompt ends where a token may begin: before a line break, not after it.
DEFAULT_PROMPTS = (
    "def fibonacci(n):",
    "class Stack:\n    def __init__(self):",
    "import os\nimport sys\n\n\ndef main():",
    "def read_lines(path):\n    with open(path) as stream:",
    "class Node:\n    def __init__(self, value, left=None, right=None):",
    "def test_addition():\n    assert",
    "for index, name in enumerate(names):",
    "import json\n\n\ndef load_json(filename):",
)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How requests of a cell speculate.

    Args:
        name: Shown in table and plot.
        keywords: For AsyncClient.stream.
    """

    name: str
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RequestResult:
    """One request as the client saw it; times in seconds from sending it.

    Args:
        arrivals: (time, tokens) of every delta.
    """

    token_ids: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    elapsed_s: float
    finish: FinishInfo

    @property
    def time_to_first_token_s(self) -> float:
        """Return when the first token arrived."""
        return self.arrivals[0][0] if self.arrivals else self.elapsed_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """Return the mean time per token after the first delta; None without one."""
        num_later = sum(count for _, count in self.arrivals[1:])
        if not num_later:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / num_later


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """A cell's figures; times in milliseconds.

    Args:
        tokens_per_second: Output tokens of all requests over the time that all took.
        accept_length: Mean tokens per round, bonus included, over all rounds.
        identical_share: Requests whose output equals the plain one's; None without a plain cell.
    """

    mode: str
    concurrency: int
    num_requests: int
    num_tokens: int
    elapsed_s: float
    tokens_per_second: float
    time_to_first_token_ms_p50: float
    time_to_first_token_ms_p99: float
    time_per_output_token_ms_p50: float
    time_per_output_token_ms_p99: float
    request_ms_p50: float
    accept_length: float
    root_only_share: float
    identical_share: float | None


async def run_bench(
    address: str,
    *,
    modes: Sequence[Mode],
    concurrencies: Sequence[int],
    prompts: Sequence[str],
    requests_per_cell: int,
    keywords: Mapping[str, Any],
    on_cell: Callable[[CellResult], None],
) -> list[CellResult]:
    """Run every mode at every concurrency.

    Args:
        modes: A mode named "plain" is what outputs are compared with.
        requests_per_cell: At least the concurrency is run.
        keywords: For AsyncClient.stream, in every mode.
        on_cell: Called with each CellResult.
    Raises: CoppiceError of the first request that fails.
    """
    results = []
    plain_outputs: dict[int, tuple[int, ...]] = {}
    async with AsyncClient(address) as client:
        for mode in modes:  # warm up: compiled kernels, caches, connections
            await run_request(client, prompts[0], {**keywords, **mode.keywords, "seed": 0})
        for concurrency in concurrencies:
            count = max(concurrency, requests_per_cell)
            for mode in modes:
                cell_keywords = {**keywords, **mode.keywords}
                started = time.perf_counter()
                requests = await run_cell(client, prompts, cell_keywords, concurrency, count)
                elapsed_s = time.perf_counter() - started
                if mode.name == "plain":
                    plain_outputs = {i: request.token_ids for i, request in enumerate(requests)}
                result = summarize(mode.name, concurrency, requests, elapsed_s, plain_outputs)
                results.append(result)
                on_cell(result)
    return results


def summarize(
    mode: str,
    concurrency: int,
    requests: Sequence[RequestResult],
    elapsed_s: float,
    plain_outputs: Mapping[int, tuple[int, ...]],
) -> CellResult:
    """Turn the requests of a cell into its figures."""
    num_tokens = sum(len(request.token_ids) for request in requests)
    stats = [request.finish.speculation for request in requests]
    num_rounds = sum(s.num_rounds for s in stats)
    num_accepted = sum(s.num_accepted_drafts for s in stats)
    first = [1e3 * request.time_to_first_token_s for request in requests]
    each = [1e3 * t for r in requests if (t := r.time_per_output_token_s) is not None]
    compared = [
        request.token_ids == plain_outputs[index]
        for index, request in enumerate(requests)
        if index in plain_outputs
    ]
    return CellResult(
        mode=mode,
        concurrency=concurrency,
        num_requests=len(requests),
        num_tokens=num_tokens,
        elapsed_s=elapsed_s,
        tokens_per_second=num_tokens / elapsed_s,
        time_to_first_token_ms_p50=percentile(first, 50),
        time_to_first_token_ms_p99=percentile(first, 99),
        time_per_output_token_ms_p50=percentile(each, 50),
        time_per_output_token_ms_p99=percentile(each, 99),
        request_ms_p50=percentile([1e3 * request.elapsed_s for request in requests], 50),
        accept_length=(num_accepted + num_rounds) / num_rounds if num_rounds else 0.0,
        root_only_share=sum(s.num_root_only_rounds for s in stats) / max(1, num_rounds),
        identical_share=sum(compared) / len(compared) if compared else None,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile; 0 without values."""
    if not values:
        return 0.0
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


async def run_cell(
    client: AsyncClient,
    prompts: Sequence[str],
    keywords: Mapping[str, Any],
    concurrency: int,
    count: int,
) -> list[RequestResult]:
    """Run `count` requests, so many at a time, over the prompts in turn.

    Raises: CoppiceError of the first request that fails.
    """
    results: dict[int, RequestResult] = {}
    indices = iter(range(count))
    texts = list(itertools.islice(itertools.cycle(prompts), count))

    async def work() -> None:
        for index in indices:
            results[index] = await run_request(client, texts[index], {"seed": index, **keywords})

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [results[index] for index in range(count)]


async def run_request(
    client: AsyncClient, prompt: str | None, keywords: Mapping[str, Any]
) -> RequestResult:
    """Stream one request to its end.

    Args:
        keywords: For AsyncClient.stream.
    """
    token_ids: list[int] = []
    arrivals: list[tuple[float, int]] = []
    finish: FinishInfo | None = None
    started = time.perf_counter()
    async for event in client.stream(prompt, **keywords):
        if isinstance(event, TokenDelta) and event.token_ids:
            token_ids += event.token_ids
            arrivals.append((time.perf_counter() - started, len(event.token_ids)))
        elif isinstance(event, FinishInfo):
            finish = event
    assert finish is not None, "a stream that ends without an error has a FinishInfo"
    return RequestResult(
        token_ids=tuple(token_ids),
        arrivals=tuple(arrivals),
        elapsed_s=time.perf_counter() - started,
        finish=finish,
    )
