"""Tables of `coppice bench`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coppice.bench.compare import arrivals_of
from coppice.bench.envelope import AUTO, envelope_of

if TYPE_CHECKING:
    from rich.table import Table

    from coppice.bench.compare import Pair
    from coppice.timeline import TimelineResult

WIDTH = 240
"""Columns at most of output that goes to no terminal."""

Run = Mapping[str, Any]


def print_runs(runs: Sequence[Run]) -> None:
    """Print a line per run."""
    is_closed = "batch" in runs[0]
    points = "p50 / p90 / p99"
    has_goodput = "goodput" in runs[0]
    columns = {
        "arrivals": arrivals_of,
        "speculation": lambda run: run["speculation"],
        "decode tokens/s" if is_closed else "tokens/s": _speed,
        f"first token ms\n{points}": lambda run: _quantiles(run["first_token_ms"]),
        f"ms per token\n{points}": lambda run: _quantiles(run["per_token_ms"]),
        f"gaps ms\n{points} / p99.9": lambda run: _quantiles(run["gap_ms"]),
        f"request ms\n{points}": lambda run: _quantiles(run["request_ms"]),
        "accept_length": lambda run: _number(run["accept_length"], ".2f"),
        "root only": lambda run: _number(run["root_only_share"], ".0%"),
        "identical": lambda run: _number(run["identical"], ".0%"),
    }
    if not is_closed:
        columns["failed"] = lambda run: f"{run['failed']:g} of {run['requests']:g}"
    if has_goodput:
        columns["good requests/s"] = _goodput
    if any("identical_to_file" in run for run in runs):
        columns["= file"] = lambda run: _number(run.get("identical_to_file"), ".0%")
    table = _table()
    for index, title in enumerate(columns):
        table.add_column(title, justify="left" if index < 2 else "right")
    for run in runs:
        table.add_row(*(text(run) for text in columns.values()))
    _print(table)


def print_envelope(runs: Sequence[Run]) -> None:
    """Print what AUTO reaches of the best of the others, if batches were measured with both."""
    points = [f"{p.share:.2f} of {p.name} at {p.batch}" for p in envelope_of(runs)]
    if points:
        sys.stdout.write(f"{AUTO} reaches {', '.join(points)}\n")


def print_pairs(pairs: Sequence[Pair], names: tuple[str, str]) -> None:
    """Print a table per pair of runs: both figures and their difference.

    Args:
        names: Of the two results.
    """
    for pair in pairs:
        table = _table(pair.title)
        table.add_column("figure")
        for title in (*names, "difference"):
            table.add_column(title, justify="right")
        for each in pair.differences:
            change = "-" if each.change is None else f"{each.change:+.1%}"
            table.add_row(each.name, f"{each.before:,.6g}", f"{each.after:,.6g}", change)
        _print(table)


def print_timeline(timeline: TimelineResult) -> None:
    """Print a line per stage of a round."""
    table = _table(timeline.title)
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
    _print(table)


def brief(run: Run) -> str:
    """Return a run in a line, for while the others go on."""
    first = (run["first_token_ms"] or {}).get("p50", 0.0)
    each = (run["per_token_ms"] or {}).get("p50", 0.0)
    return (
        f"{arrivals_of(run)}, speculation {run['speculation']}: {_speed(run)} tokens/s, "
        f"first token {first:.1f} ms, {each:.2f} ms per token"
    )


def _speed(run: Run) -> str:
    """Return tokens per second and, of repeats, between what they lay."""
    name = "decode_tokens_per_second" if "batch" in run else "tokens_per_second"
    least, most = run["spread"][name] or (None, None)
    speed = _number(run[name], ",.1f")
    return speed if least == most else f"{speed} ({least:,.0f} to {most:,.0f})"


def _goodput(run: Run) -> str:
    good = run["goodput"]
    return f"{good['requests_per_second']:.2f} ({good['share']:.0%})"


def _quantiles(values: Mapping[str, float] | None) -> str:
    if values is None:
        return "-"
    return " / ".join(f"{each:.{_digits(each)}f}" for each in values.values())


def _digits(value: float) -> int:
    """Return how many digits behind the point make three in all."""
    return 2 if value < 10 else 1 if value < 100 else 0


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(title: str | None = None) -> Table:
    from rich.table import Table

    return Table(title=title, title_justify="left")


def _print(table: Table) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
