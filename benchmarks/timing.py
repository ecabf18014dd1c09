"""How long things take on a device, and how a script writes down what it measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine

_NUM_SAMPLES = 5
_SAMPLE_SECONDS = 0.02


def time_ms(
    calls: Sequence[Callable[[], object]], device: torch.device, *, use_graph: bool = True
) -> float:
    """Return the time of one call, milliseconds: the median of a few runs over all calls.

    Args:
        calls: The same work on different memory, so that no cache helps the next one.
        use_graph: On a GPU, capture all calls into one CUDA graph and replay that.
    """
    run = _captured(calls) if use_graph and device.type == "cuda" else _in_turn(calls)
    run()
    once = _seconds(run, device, 1)
    count = max(1, min(100, int(_SAMPLE_SECONDS / max(once, 1e-6))))
    samples = [_seconds(run, device, count) for _ in range(_NUM_SAMPLES)]
    return statistics.median(samples) / count / len(calls) * 1e3


def _in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Return what replays all calls; kernels are compiled and tuned before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (*calls[:2], *calls[:2]):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _in_turn(calls)()
    return graph.replay


def _seconds(run: Callable[[], None], device: torch.device, count: int) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(count):
            run()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a kernel reads and writes which copies a large array.

    A kernel, and no plain copy: that is the copy engine's, which is slower than the memory.
    """
    size = 1 << (30 if device.type == "cuda" else 24)
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 16)
    source = torch.ones(size, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    num_bytes = 2 * size * source.element_size()
    copy_ms = time_ms([lambda: torch.neg(source, out=target)], device, use_graph=False)
    return num_bytes / copy_ms * 1e3


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a large product by torch."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / time_ms([lambda: a @ b], device) * 1e3


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; nothing to do for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def add_output_flag(parser: argparse.ArgumentParser) -> None:
    """Add --output."""
    parser.add_argument("--output", default="", help="file to write, JSON")


def report(
    rows: Sequence[Any],
    args: argparse.Namespace,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the result file that the flags ask for, then print the table.

    Args:
        rows: Dataclasses of one type, lines of the table.
        extra: More for the file.
    """
    if args.output:
        lines = [dataclasses.asdict(row) for row in rows]
        result = {**describe_machine(), **(extra or {}), "rows": lines}
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    for key, value in (extra or {}).items():
        sys.stdout.write(f"{key}: {value}\n")
    if rows:
        names = [field.name for field in dataclasses.fields(rows[0])]
        sys.stdout.write("\n| " + " | ".join(names) + " |\n|" + "---|" * len(names) + "\n")
    for row in rows:
        cells = (_cell(value) for value in dataclasses.astuple(row))
        sys.stdout.write("| " + " | ".join(cells) + " |\n")
    sys.stdout.flush()


def progress(text: str) -> None:
    """Tell the terminal what goes on."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def integers(text: str) -> list[int]:
    """Parse "1,8,32"."""
    return [int(part) for part in text.split(",")]


def blocks(text: str) -> list[tuple[int, int]]:
    """Parse "1x64,8x16": requests x nodes."""
    pairs = (part.split("x") for part in text.split(","))
    return [(int(num_requests), int(num_nodes)) for num_requests, num_nodes in pairs]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
