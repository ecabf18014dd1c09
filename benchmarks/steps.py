"""Where every microsecond of a step goes: a table by kernel and a picture (SVG).

One step of the target engine (a tree per request) and one round of the draft engine (extend and
growth), as torch's profiler sees them: kernels in order of time, gaps included. The profiler slows
the host, so the wall time without it stands beside; if the gaps are all that differs, the kernels
are right. On a CPU, operators stand in for kernels.

    python -m benchmarks.steps --svg build/steps --output benchmarks/results/steps.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.draft import MadeUpRequest
from benchmarks.models import Pair, add_model_flags, open_pair, resolve_flags
from benchmarks.rows import fill_noise
from benchmarks.target_steps import StretchedRequests
from benchmarks.timing import add_output_flag, report, synchronize
from coppice.svg import Bar, Chart, Span, draw_charts
from shared.config.check import parse_shape
from shared.messages import MAX_TREE_NODES

_WARM_UP = 8
_MOST_BARS = 30
_GAP = "(no kernel)"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table: a kernel, summed over a step.

    Args:
        share: Of the time from the first kernel to the end of the last.
    """

    step: str
    kernel: str
    count: int
    us: float
    share: float


def main() -> None:
    """Profile what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_model_flags(parser)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--shape", default="", help="num_steps/topk/num_draft_tokens, or plain")
    parser.add_argument("--context", type=int, help="tokens before the step")
    parser.add_argument("--svg", default="", help="where pictures go: PREFIX-target.svg, ...")
    add_output_flag(parser)
    args = parser.parse_args()
    device = resolve_flags(args)
    is_gpu = device.type == "cuda"
    args.shape = args.shape or ("5/8/32" if is_gpu else "4/2/8")
    args.context = args.context or (1024 if is_gpu else 64)
    with open_pair(args.model, args.draft_model) as pair:
        what = f"{args.requests} x {args.shape} after {args.context}"
        steps = {f"target, {what}": _target(pair, args)}
        if args.shape != "plain":
            steps[f"draft, {what}"] = _draft(pair, args)
    lines: list[Line] = []
    walls = {}
    for title, (kernels, wall_ms) in steps.items():
        lines += summarize(title, kernels)
        walls[title] = f"{wall_ms:.3f} ms without the profiler"
        if args.svg:
            path = Path(f"{args.svg}-{title.split(',')[0]}.svg")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(draw_charts([chart(f"{title}: {walls[title]}", kernels)]))
            sys.stdout.write(f"{path}\n")
    report(lines, args, extra={"model": args.model, "wall": walls})


def _target(pair: Pair, args: argparse.Namespace) -> tuple[list[Span], float]:
    engine = pair.target_engine(
        args,
        max_num_requests=args.requests,
        max_context_len=args.context + 4 * MAX_TREE_NODES,
        kv_memory_fraction=0.4,
    )
    fill_noise(engine.runner.pool)
    requests = StretchedRequests(engine, args.requests, args.context)
    num_nodes = 1 if args.shape == "plain" else parse_shape(args.shape).num_draft_tokens
    return _profile(
        lambda: requests.submit_round(num_nodes), requests.step, engine.runner.pool.device
    )


def _draft(pair: Pair, args: argparse.Namespace) -> tuple[list[Span], float]:
    num_new = 4
    engine = pair.draft_engine(
        args,
        max_num_requests=args.requests,
        max_context_len=args.context + (_WARM_UP + 2) * num_new + MAX_TREE_NODES,
    )
    shape = parse_shape(args.shape)
    requests = [MadeUpRequest(engine, i, args.context, num_new) for i in range(args.requests)]

    def prepare() -> None:
        for request in requests:
            request.submit_round(shape)

    return _profile(prepare, engine.step, engine.runner.pool.device)


def _profile(
    prepare: Callable[[], None], step: Callable[[], object], device: torch.device
) -> tuple[list[Span], float]:
    """Return the kernels of one step, and the wall time of the step before, milliseconds."""
    for _ in range(_WARM_UP):
        prepare()
        synchronize(device)
        started = time.perf_counter()
        step()
        synchronize(device)
        wall_ms = (time.perf_counter() - started) * 1e3
    is_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_gpu
    for _ in range(2):  # the first one starts the profiler itself
        prepare()
        synchronize(device)
        with profile(activities=activities, acc_events=True) as profiler:
            step()
            synchronize(device)
    wanted = DeviceType.CUDA if is_gpu else DeviceType.CPU
    events = [
        event
        for event in profiler.events()
        if event.device_type == wanted and (is_gpu or event.cpu_parent is None)
    ]
    first = min(event.time_range.start for event in events)
    kernels = [
        Span(
            name=event.name,
            start_us=event.time_range.start - first,
            end_us=event.time_range.end - first,
        )
        for event in events
    ]
    return sorted(kernels, key=lambda kernel: kernel.start_us), wall_ms


def summarize(title: str, kernels: Sequence[Span]) -> list[Line]:
    """Return a line per kernel, the longest first, and one for the time between kernels.

    Kernels overlap: one that starts early waits for the one before it, and what it takes begins
    when that one ends.

    Args:
        kernels: By start.
    """
    span = max(kernel.end_us for kernel in kernels)
    by_name: dict[str, list[float]] = {}
    busy_until = 0.0
    for kernel in kernels:
        start = max(kernel.start_us, busy_until)
        by_name.setdefault(short_name(kernel.name), []).append(max(kernel.end_us - start, 0.0))
        busy_until = max(busy_until, kernel.end_us)
    totals = {name: (len(times), sum(times)) for name, times in by_name.items()}
    gaps = gaps_us(kernels)
    totals[_GAP] = (len(gaps), sum(gaps))
    return [
        Line(step=title, kernel=name, count=count, us=us, share=us / span)
        for name, (count, us) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]


def gaps_us(kernels: Sequence[Span]) -> list[float]:
    """Return how long nothing ran, each time that nothing did.

    Args:
        kernels: By start.
    """
    gaps, busy_until = [], 0.0
    for kernel in kernels:
        if kernel.start_us > busy_until:
            gaps.append(kernel.start_us - busy_until)
        busy_until = max(busy_until, kernel.end_us)
    return gaps


def short_name(name: str) -> str:
    """Return a kernel's name without its template arguments and parameters."""
    name = name.removeprefix("void ").split("(")[0].split("<")[0]
    return name[-56:]


def chart(title: str, kernels: Sequence[Span]) -> Chart:
    """Return the step as one strip over time, and a bar per kernel."""
    span = max(kernel.end_us for kernel in kernels)
    return Chart(
        title=f"{title}; {span:.0f} us from the first kernel to the end of the last",
        spans=[replace(kernel, name=short_name(kernel.name)) for kernel in kernels],
        bars=[
            Bar(
                name=line.kernel,
                us=line.us,
                label=f"{line.us:.1f} us, {line.share:.1%}, {line.count} x",
            )
            for line in summarize("", kernels)[:_MOST_BARS]
        ],
        idle=_GAP,
    )


if __name__ == "__main__":
    main()
