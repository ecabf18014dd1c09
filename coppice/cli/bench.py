"""`coppice bench`: throughput and latency of a running server; a table, JSON and a plot."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coppice.cli.options import add_server_option, require_server
from coppice.stack.config import split_list
from shared.config.check import parse_shape
from shared.errors import ConfigError

if TYPE_CHECKING:
    from coppice.bench import CellResult, Mode
    from coppice.timeline import TimelineResult

COLUMNS = (
    ("mode", lambda r: r.mode),
    ("requests at once", lambda r: str(r.concurrency)),
    ("tokens/s", lambda r: f"{r.tokens_per_second:.1f}"),
    ("first token ms p50", lambda r: f"{r.time_to_first_token_ms_p50:.1f}"),
    ("p99", lambda r: f"{r.time_to_first_token_ms_p99:.1f}"),
    ("ms/token p50", lambda r: f"{r.time_per_output_token_ms_p50:.2f}"),
    ("p99", lambda r: f"{r.time_per_output_token_ms_p99:.2f}"),
    ("accept_length", lambda r: f"{r.accept_length:.2f}"),
    ("root only", lambda r: f"{r.root_only_share:.0%}"),
    ("= plain", lambda r: "-" if r.identical_share is None else f"{r.identical_share:.0%}"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench`."""
    parser = commands.add_parser("bench", help="measure a running server", allow_abbrev=False)
    add_server_option(parser)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="a prompt per line; a line that is a JSON string may hold newlines "
        "(default: a few beginnings of Python code)",
    )
    parser.add_argument(
        "--concurrency", default="1,4", help="requests at once, a list (default: 1,4)"
    )
    parser.add_argument(
        "--requests", type=int, default=16, help="requests per measurement (default: 16)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument(
        "--speculation", choices=("on", "off", "both"), default="both", help="default: both"
    )
    parser.add_argument(
        "--trees",
        default="",
        metavar="STEPS/TOPK/NODES,...",
        help="tree shapes to compare (default: the server's)",
    )
    parser.add_argument("--output", metavar="FILE", help="write the figures as JSON")
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument("--plot", metavar="FILE", help="write tokens per second as SVG")
    picture.add_argument(
        "--timeline",
        nargs="?",
        const="",
        metavar="FILE",
        help="say where a round's time goes instead: a table, and a picture (SVG) if there is a "
        "FILE",
    )
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the files."""
    from coppice.bench import DEFAULT_PROMPTS, run_bench
    from coppice.bench_plot import draw_plot
    from coppice.svg import draw_charts
    from coppice.timeline import chart, measure_timelines, stage_colors

    prompts = _read_prompts(arguments.prompts) if arguments.prompts else list(DEFAULT_PROMPTS)
    what: dict[str, Any] = {
        "modes": _modes(arguments),
        "concurrencies": _concurrencies(arguments.concurrency),
        "prompts": prompts,
        "requests_per_cell": arguments.requests,
        # Equal lengths make modes comparable.
        "keywords": {
            "max_new_tokens": arguments.max_new_tokens,
            "temperature": arguments.temperature,
            "ignore_eos": True,
        },
    }
    require_server(arguments.server)
    if arguments.timeline is not None:
        timelines = asyncio.run(measure_timelines(arguments.server, **what))
        for timeline in timelines:
            _print_timeline(timeline)
        _write_json(arguments, prompts, timelines)
        if arguments.timeline:
            charts = [chart(each) for each in timelines]
            Path(arguments.timeline).write_text(draw_charts(charts, colors=stage_colors()))
        return 0
    results = asyncio.run(run_bench(arguments.server, **what, on_cell=_say))
    _print_table(results)
    _write_json(arguments, prompts, results)
    if arguments.plot:
        Path(arguments.plot).write_text(draw_plot(results, title="tokens per second"))
    return 0


def _write_json(
    arguments: argparse.Namespace,
    prompts: Sequence[str],
    cells: Sequence[CellResult] | Sequence[TimelineResult],
) -> None:
    if not arguments.output:
        return
    document = {
        "server": arguments.server,
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "num_prompts": len(prompts),
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }
    Path(arguments.output).write_text(json.dumps(document, indent=1) + "\n")


def _say(result: CellResult) -> None:
    speed = f"{result.tokens_per_second:.1f} tokens/s"
    sys.stderr.write(f"{result.mode}, {result.concurrency} at once: {speed}\n")


def _modes(arguments: argparse.Namespace) -> list[Mode]:
    from coppice.bench import Mode

    modes = []
    if arguments.speculation in ("off", "both"):
        modes.append(Mode(name="plain", keywords={"speculation": False}))
    if arguments.speculation in ("on", "both"):
        shapes = split_list(arguments.trees)
        modes += [
            Mode(name=shape, keywords=dataclasses.asdict(parse_shape(shape))) for shape in shapes
        ]
        if not shapes:
            modes.append(Mode(name="speculation"))
    return modes


def _concurrencies(text: str) -> list[int]:
    parts = split_list(text)
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"--concurrency is {text!r}, expected a list of numbers as in 1,4,16")
    return [int(part) for part in parts]


def _read_prompts(path: str) -> list[str]:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read --prompts {path}: {error.strerror}") from error
    prompts = [_parse_prompt(line) for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {path} holds no prompt")
    return prompts


def _parse_prompt(line: str) -> str:
    if line.startswith('"'):
        try:
            value: Any = json.loads(line)
        except json.JSONDecodeError:
            return line
        return str(value)
    return line


def _print_table(results: list[CellResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for title, _ in COLUMNS:
        table.add_column(title, justify="left" if title == "mode" else "right")
    for result in results:
        table.add_row(*(text(result) for _, text in COLUMNS))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)


def _print_timeline(timeline: TimelineResult) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=timeline.title, title_justify="left")
    table.add_column("stage")
    for title in ("rounds", "median us", "p95 us", "share"):
        table.add_column(title, justify="right")
    for stage in timeline.stages:
        table.add_row(
            stage.name,
            str(stage.num_rounds),
            f"{stage.median_us:.0f}",
            f"{stage.p95_us:.0f}",
            f"{stage.share:.1%}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
