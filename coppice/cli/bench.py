"""`coppice bench`: latency and throughput of a running server; tables, JSON and plots."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coppice import __version__
from coppice.cli import bench_options as options
from coppice.cli.options import add_server_option, credentials_of, open_admin, require_server
from shared.errors import ConfigError, CoppiceError

if TYPE_CHECKING:
    from coppice.bench.measure import Bench
    from coppice.bench.outputs import OutputLog

SETTLE_S = 0.2
"""Until idle workers have said what they counted: they report every 50 ms."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench`."""
    parser = commands.add_parser(
        "bench",
        help="measure a running server",
        allow_abbrev=False,
        description="Measure a running server: batches of requests that arrive at once, or "
        "requests that arrive by a schedule or at random.",
    )
    # No subcommand: argparse would take a mistyped option's value for one.
    parser.add_argument(
        "compare",
        nargs="*",
        metavar="compare A.json B.json",
        help="measure nothing: show two files that --output wrote side by side",
    )
    add_server_option(parser)
    options.add_options(parser)
    parser.set_defaults(run=run, parser=parser)


def _run_compare(arguments: argparse.Namespace) -> int:
    from coppice.bench.compare import compare, identical_outputs, read_result
    from coppice.cli.bench_tables import print_pairs

    paths = options.compared_files(arguments)
    before, after = map(read_result, paths)
    pairs = compare(before["runs"], after["runs"])
    if not pairs:
        raise ConfigError(f"{' and '.join(paths)} have no arrivals in common")
    names = Path(paths[0]).stem, Path(paths[1]).stem
    print_pairs(pairs, names if names[0] != names[1] else ("A", "B"))
    num_both, num_same = identical_outputs(before, after)
    if num_both:
        sys.stdout.write(f"{num_same} of {num_both} outputs are identical\n")
    fingerprints = [each.get("model_fingerprint") for each in (before, after)]
    if all(fingerprints) and fingerprints[0] != fingerprints[1]:
        sys.stdout.write("the models compute otherwise: model_fingerprint differs\n")
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the tables, write the files."""
    if arguments.compare:
        return _run_compare(arguments)
    options.check_options(arguments)
    if arguments.timeline is not None:
        return _run_timeline(arguments)
    return _run_measurements(arguments)


def _run_measurements(arguments: argparse.Namespace) -> int:
    from coppice.bench.clients import ClientProcesses, default_num_processes
    from coppice.bench.figures import Goodput
    from coppice.bench.measure import Bench
    from coppice.bench.outputs import OutputLog
    from coppice.bench.plot import plot_runs
    from coppice.cli.bench_tables import print_envelope, print_runs

    measurements = list(options.measurements_of(arguments))
    goodput = Goodput.parse(arguments.goodput) if arguments.goodput else None
    outputs = OutputLog(arguments.temperature, _reference(arguments.compare_outputs))
    num_processes = arguments.processes or default_num_processes()
    num_connections = arguments.connections or 1
    credentials = credentials_of(arguments)
    require_server(arguments.server, credentials)
    before = _read_workers(arguments)
    with ClientProcesses(
        arguments.server,
        num_processes,
        num_connections=num_connections,
        credentials=credentials,
    ) as clients:
        bench = Bench(
            clients,
            keywords=options.keywords_of(arguments),
            repeat=options.num_repeats(arguments),
            goodput=goodput,
            outputs=outputs,
        )
        runs = [run for measurement in measurements for run in _measure(measurement, bench)]
    print_runs(runs)
    print_envelope(runs)
    _say_overhead(runs, num_processes)
    _warn_without_counterparts(arguments.compare_outputs, runs)
    counted = _count(before, arguments)
    if arguments.output:
        settings = {
            "processes": num_processes,
            "connections": num_connections,
            "goodput_limits_s": goodput and goodput.limits_s,
        }
        document = _document(arguments, bench, outputs, settings)
        _write(arguments.output, {**document, **counted, "runs": runs})
    if arguments.plot:
        Path(arguments.plot).write_text(plot_runs(runs))
    return 1 if any(each["failures"] for each in runs) else 0


def _measure(measurement: options.Measurement, bench: Bench) -> list[dict[str, Any]]:
    """Measure some runs, and say what came of them while others go on."""
    from coppice.bench.figures import warning_of
    from coppice.cli.bench_tables import brief

    runs = measurement(bench)
    for figures in runs:
        sys.stderr.write(brief(figures) + "\n")
        for reason, count in figures["failures"].items():
            sys.stderr.write(f"warning: {count} requests failed: {reason}\n")
        if num_short := figures["ended_by_context"]:
            sys.stderr.write(
                f"warning: {num_short:g} of {figures['requests'] - figures['failed']:g} outputs "
                "ended before the length that was asked for: the context ends there "
                "(max_context_len)\n"
            )
        if warning := warning_of(figures["clients"], is_batch="batch" in figures):
            sys.stderr.write(f"warning: {warning}\n")
    return runs


def _say_overhead(runs: Sequence[Mapping[str, Any]], num_processes: int) -> None:
    clients = [each["clients"] for each in runs]
    busy = max(each["cpu_share_max"] for each in clients)
    late_ms = max(each["late_ms_p99"] for each in clients)
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    sys.stdout.write(
        f"clients: {processes}, busy {busy:.0%} of the time at most; requests were sent "
        f"{late_ms:.1f} ms late (p99)\n"
    )


def _reference(path: str | None) -> Mapping[str, str] | None:
    """Return the outputs of another result."""
    from coppice.bench.compare import outputs_of, read_result

    if path is None:
        return None
    if outputs := outputs_of(read_result(path)):
        return outputs
    raise ConfigError(f"--compare-outputs {path} holds no outputs")


def _warn_without_counterparts(path: str | None, runs: Sequence[Mapping[str, Any]]) -> None:
    if path is not None and all(each["identical_to_file"] is None for each in runs):
        sys.stderr.write(f"warning: --compare-outputs {path} holds none of these requests\n")


def _read_workers(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the workers and their counters; none without --admin."""
    from coppice.bench.workers import read_workers

    if not arguments.admin:
        return {}
    shown = {"address": arguments.admin, "token_file": arguments.admin_token_file}
    with open_admin(argparse.Namespace(**{**vars(arguments), **shown})) as client:
        return read_workers(client)


def _count(
    before: Mapping[str, Mapping[str, Any]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Show by how much the workers' counters have grown; return it for the JSON."""
    from coppice.bench.workers import describe, differences

    if not before:
        return {}
    time.sleep(SETTLE_S)
    try:
        grown = differences(before, _read_workers(arguments))
    except CoppiceError as error:  # what was measured is not lost
        sys.stderr.write(f"warning: no counters of workers: {error}\n")
        return {}
    for address, counters in grown.items():
        sys.stdout.write(describe(address, counters) + "\n")
    return {"workers": before, "counters": grown}


def _run_timeline(arguments: argparse.Namespace) -> int:
    from coppice.cli.bench_tables import print_timeline
    from coppice.svg import draw_charts
    from coppice.timeline import chart, measure_timelines, stage_colors

    what: dict[str, Any] = {
        "modes": options.modes_of(arguments),
        "concurrencies": options.concurrencies(arguments),
        "prompts": options.prompts_of(arguments),
        "requests_per_cell": arguments.requests or options.DEFAULT_REQUESTS,
        "max_new_tokens": options.new_tokens(arguments),
        "seed": arguments.seed,
        "keywords": options.keywords_of(arguments),
        "credentials": credentials_of(arguments),
    }
    require_server(arguments.server, what["credentials"])
    timelines = asyncio.run(measure_timelines(arguments.server, **what))
    for timeline in timelines:
        print_timeline(timeline)
    if arguments.output:
        cells = [dataclasses.asdict(timeline) for timeline in timelines]
        _write(arguments.output, {**_origin(arguments), "cells": cells})
    if arguments.timeline:
        charts = [chart(each) for each in timelines]
        Path(arguments.timeline).write_text(draw_charts(charts, colors=stage_colors()))
    return 0


def _document(
    arguments: argparse.Namespace,
    bench: Bench,
    outputs: OutputLog,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    info = bench.info
    return {
        **_origin(arguments),
        "model": info and info.model,
        "model_fingerprint": info and info.model_fingerprint,
        "settings": settings,
        "outputs_digest": outputs.digest(),
        "outputs": outputs.digests,
    }


def _origin(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return where figures come from: command, date, machine, server."""
    return {
        "coppice": __version__,
        "command": shlex.join(["coppice", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "server": arguments.server,
    }


def _processor() -> str:
    """Return the processor's name, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _write(path: str, document: Mapping[str, Any]) -> None:
    Path(path).write_text(json.dumps(document, indent=1) + "\n")
