"""What counting costs a deployment: decoding with metrics that are scraped, and without any.

    python -m benchmarks.metrics --requests 8 --new-tokens 256 --repeat 12 --output FILE

Two stacks of the bundled models on this machine's CPU, one with `--metrics-port`, whose processes
are all scraped each second, one without. They run the same requests in turn, in an order that
alternates. Compared is each run with its neighbour: tokens per second, and CPU time per token of
all processes of the stack, which other work on the machine changes less. The scraper runs in this
process, so that its own time is not in the latter.

Engines count whether somebody asks or not. What that adds to a step is measured by itself, as CPU
time of the very calls that a target makes: with `--steps-only` nothing else is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.machine import describe_machine
from coppice import Client
from coppice.stack import Stack
from coppice.stack.config import stack_config
from shared.config import DraftConfig, TargetConfig
from target_service.engine_state import STAGES, StepCounts
from tests.processes import members_of

PORT = 9400
SCRAPE_INTERVAL_S = 1.0
_MIN_PAIRS = 6
_NUM_BATCHES, _BATCH_STEPS = 40, 1000
PROMPTS = (
    *("def add(a, b):", "class Stack:", "import json\n", "for i in range(10):"),
    *("def main():", "while True:", "x = [", "def fibonacci(n):"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of all requests."""

    token_ids: tuple[tuple[int, ...], ...]
    tokens_per_s: float
    cpu_ms_per_token: float


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=8, help="at a time")
    parser.add_argument("--new-tokens", type=int, default=256, help="of each request")
    parser.add_argument("--repeat", type=int, default=12, help="pairs of runs, 6 at least")
    parser.add_argument("--speculation", action="store_true", help="with trees")
    parser.add_argument("--steps-only", action="store_true", help="only what steps count")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.repeat < _MIN_PAIRS:
        parser.error(f"--repeat: {_MIN_PAIRS} pairs at least, else there is no interval of 95 %")
    steps_us = {num_requests: _step_us(num_requests) for num_requests in (1, 8, 64)}
    print(  # noqa: T201
        *(f"{us:.1f} us a step of {count} requests" for count, us in steps_us.items()), sep=", "
    )
    result = {} if arguments.steps_only else _compare_stacks(arguments)
    if arguments.output is not None:
        told = {k: v for k, v in vars(arguments).items() if k != "output"}
        document = {"machine": describe_machine(), **told, "step_us": steps_us, "results": result}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


def _step_us(num_requests: int) -> float:
    """Return the CPU time that counting adds to a step of a target: the least of some batches."""
    requests: Any = [SimpleNamespace(queued=None)] * num_requests
    counts = StepCounts()

    def step() -> None:
        clock = counts.tallies.clock
        launched_ns = clock.begin()
        for stage in STAGES:
            clock.end(stage)
        counts.note_launch(requests, num_rows=8 * num_requests, num_requests=num_requests)
        counts.note_read(launched_ns, launched_ns + 5_000_000)

    took_s = []
    for _ in range(_NUM_BATCHES):
        began = time.process_time()
        for _ in range(_BATCH_STEPS):
            step()
        took_s.append(time.process_time() - began)
    return round(min(took_s) / _BATCH_STEPS * 1e6, 2)


def _compare_stacks(arguments: argparse.Namespace) -> dict[str, Any]:
    runs = _measure(arguments)
    result = {
        name: compared([getattr(run, name) for run in runs[False]], [*values])
        for name, values in (
            ("tokens_per_s", [run.tokens_per_s for run in runs[True]]),
            ("cpu_ms_per_token", [run.cpu_ms_per_token for run in runs[True]]),
        )
    }
    for name, figures in result.items():
        print(  # noqa: T201
            f"{name}: {figures['without']:.3f} without metrics, {figures['with']:.3f} with, "
            f"{figures['change_percent']:+.2f} % "
            f"({figures['low_percent']:+.2f} to {figures['high_percent']:+.2f})"
        )
    return result


def _measure(arguments: argparse.Namespace) -> dict[bool, list[Run]]:
    """Return the runs without (False) and with metrics (True), in pairs."""
    runs: dict[bool, list[Run]] = {False: [], True: []}
    with ExitStack() as running:
        stacks = {
            False: running.enter_context(_stack(0, has_draft=arguments.speculation)),
            True: running.enter_context(_stack(PORT, has_draft=arguments.speculation)),
        }
        for turn in range(-1, arguments.repeat):  # the first pair warms up
            order = (False, True) if turn % 2 else (True, False)
            for has_metrics in order:
                run = _run(stacks[has_metrics], arguments)
                if turn >= 0:
                    runs[has_metrics].append(run)
                    assert run.token_ids == runs[order[0]][-1].token_ids, "outputs differ"
    return runs


@contextmanager
def _stack(metrics_port: int, *, has_draft: bool) -> Iterator[Stack]:
    given = {
        **{"device": "cpu", "port": 0, "workers": 1, "metrics_port": metrics_port},
        **{"num_drafts": int(has_draft), "log_level": "warning"},
    }
    target, draft = TargetConfig(cpu_threads=1), DraftConfig(cpu_threads=1)
    with Stack(stack_config(given, target=target, draft=draft)) as stack:
        yield stack


def _run(stack: Stack, arguments: argparse.Namespace) -> Run:
    def ask(index: int) -> tuple[int, ...]:
        completion = client.generate(
            PROMPTS[index % len(PROMPTS)],
            max_new_tokens=arguments.new_tokens,
            ignore_eos=True,
            speculation=arguments.speculation,
        )
        return tuple(completion.token_ids)

    pids = [service.pid for service in stack.services.values()]
    groups = {pid for pid in pids if pid is not None}
    with (
        _scraped(stack.metrics_urls),
        Client(stack.address) as client,
        ThreadPoolExecutor(arguments.requests) as threads,
    ):
        cpu_s, began = _cpu_seconds(groups), time.monotonic()
        token_ids = tuple(threads.map(ask, range(arguments.requests)))
        took_s, cpu_s = time.monotonic() - began, _cpu_seconds(groups) - cpu_s
    num_tokens = sum(map(len, token_ids))
    return Run(
        token_ids=token_ids,
        tokens_per_s=num_tokens / took_s,
        cpu_ms_per_token=1e3 * cpu_s / num_tokens,
    )


@contextmanager
def _scraped(urls: Mapping[str, str]) -> Iterator[None]:
    """Scrape all of them each second, as long as the block lasts."""
    is_over = threading.Event()

    def scrape() -> None:
        while urls and not is_over.wait(SCRAPE_INTERVAL_S):
            for url in urls.values():
                with urllib.request.urlopen(url, timeout=10) as reply:
                    assert b"coppice_" in reply.read()

    with ThreadPoolExecutor(1) as thread:
        scraping = thread.submit(scrape)
        try:
            yield
        finally:
            is_over.set()
        scraping.result()


def _cpu_seconds(groups: set[int]) -> float:
    """Return the CPU time so far of all processes of some process groups."""
    ticks = 0
    for pid in members_of(groups):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def compared(without: Sequence[float], with_them: Sequence[float]) -> dict[str, Any]:
    """Return medians, and the median change of the pairs with its confidence interval.

    The interval is that of the sign test: between order statistics that the true median is between
    in at least 95 % of such experiments, whatever the distribution.
    """
    changes = sorted(100 * (b / a - 1) for a, b in zip(without, with_them, strict=True))
    rank = _rank_of_95_percent(len(changes))
    return {
        "without": round(statistics.median(without), 4),
        "with": round(statistics.median(with_them), 4),
        "change_percent": round(statistics.median(changes), 2),
        "low_percent": round(changes[rank], 2),
        "high_percent": round(changes[-1 - rank], 2),
        "changes_percent": [round(change, 2) for change in changes],
    }


def _rank_of_95_percent(count: int) -> int:
    """Return the largest rank, from 0, whose order statistics bound the median at 95 %."""
    below, term, rank = 0.0, 0.5**count, 0
    for index in range(count):
        below += term
        if below > 0.025:
            break
        rank = index
        term *= (count - index) / (index + 1)
    return rank


if __name__ == "__main__":
    main()
