"""Tables of `coppice admin` and `coppice top`: workers, requests, rounds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coppice.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 160
"""Columns at most of output that goes to no terminal."""
_STYLES = {
    "READY": "green",
    "DRAINING": "yellow",
    "REFUSED": "red",
    "UNPAIRED": "red",
    "SILENT": "red",
    "CONNECTING": "dim",
}
_SOURCES = {
    "peer": "tree from the draft's engine",
    "relayed": "tree through the orchestrator",
    "resting": "no tree: it would not pay",
    "root_only": "no tree: no draft in time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the orchestrator said at a time, in seconds."""

    at_s: float
    workers: tuple[pb.WorkerStatus, ...]
    stats: pb.StatsResponse


def print_table(*tables: Any) -> None:
    """Print to the terminal, or as wide as need be to what is none."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(*tables, sep="\n")


def workers_table(
    workers: Iterable[pb.WorkerStatus],
    *,
    before: Mapping[str, pb.WorkerStatus] | None = None,
    elapsed_s: float = 0.0,
) -> Table:
    """Return a line per worker.

    Args:
        before: The same workers earlier, by address; None: without what they did since.
        elapsed_s: Since then, seconds.
    """
    from rich.text import Text

    columns = ["worker", "role", "state", "requests", "waiting", "KV used"]
    activity = ["steps/s", "rows/step", "requests/step"] if before is not None else ["steps"]
    what = ["kind", "device"] if before is not None else ["kind", "model", "device"]
    table = _table([*columns, *activity, *what], num_left=3)
    for worker in workers:
        state = pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_")
        load = worker.info.load
        table.add_row(
            worker.address,
            worker.role,
            Text(_for_how_long(state.lower(), worker.state_s), style=_STYLES[state]),
            str(load.num_running),
            str(load.num_waiting),
            _share(load.num_pages - load.num_free_pages, load.num_pages),
            *(
                [str(load.num_steps)]
                if before is None
                else _activity(worker, before.get(worker.address), elapsed_s)
            ),
            *(getattr(worker.info, name) for name in what),
        )
        if worker.problem:
            table.add_row("", "", Text(worker.problem, style="red"))
    return table


def frame(before: Sample, now: Sample) -> list[Any]:
    """Return what is going on between two samples: requests, workers, rounds."""
    elapsed_s = max(now.at_s - before.at_s, 1e-9)
    old, new = before.stats, now.stats
    num_rounds = new.num_rounds - old.num_rounds
    workers = workers_table(
        now.workers,
        before={worker.address: worker for worker in before.workers},
        elapsed_s=elapsed_s,
    )
    return [_requests(old, new, elapsed_s), workers, _rounds(old, new, num_rounds, elapsed_s)]


def _requests(old: pb.StatsResponse, new: pb.StatsResponse, elapsed_s: float) -> Table:
    columns = ["waiting", "prefilling", "decoding", "ended", "tokens/s", "rebuilds"]
    table = _table(columns, num_left=0, title="requests")
    table.add_row(
        str(new.num_waiting),
        str(new.num_prefilling),
        str(new.num_decoding),
        ", ".join(f"{count} {reason}" for reason, count in sorted(new.num_ended.items())) or "0",
        f"{(new.num_output_tokens - old.num_output_tokens) / elapsed_s:,.0f}",
        str(new.num_retries),
    )
    return table


def _rounds(
    old: pb.StatsResponse, new: pb.StatsResponse, num_rounds: int, elapsed_s: float
) -> Table:
    accepted = new.num_accepted_drafts - old.num_accepted_drafts
    drafted = new.num_draft_tokens - old.num_draft_tokens
    draft_s, target_s = new.draft_wait_s - old.draft_wait_s, new.verify_s - old.verify_s
    table = _table(["round", "value"], num_left=1, title="rounds")
    rows = {
        "rounds/s": f"{num_rounds / elapsed_s:,.1f}",
        "accept_length, tokens per round": _ratio(accepted + num_rounds, num_rounds, "{:.2f}"),
        "draft tokens accepted": _share(accepted, drafted),
        "wait for the target (with its draft, in peer rounds), ms": _ratio(
            1e3 * target_s, num_rounds, "{:.1f}"
        ),
        "wait for the draft, in relayed rounds, ms": _ratio(1e3 * draft_s, num_rounds, "{:.1f}"),
    }
    for source, meaning in _SOURCES.items():
        count = new.num_rounds_by_source[source] - old.num_rounds_by_source[source]
        rows[meaning] = _share(count, num_rounds)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _for_how_long(state: str, seconds: float) -> str:
    if not seconds:
        return state
    unit, name = next(((u, n) for u, n in ((3600, "h"), (60, "min")) if seconds >= 2 * u), (1, "s"))
    return f"{state} for {seconds // unit:.0f} {name}"


def _activity(
    worker: pb.WorkerStatus, before: pb.WorkerStatus | None, elapsed_s: float
) -> list[str]:
    if before is None or before.info.incarnation != worker.info.incarnation:
        return ["-"] * 3
    old, new = before.info.load, worker.info.load
    num_steps = new.num_steps - old.num_steps
    return [
        f"{num_steps / elapsed_s:,.1f}",
        _ratio(new.num_rows - old.num_rows, num_steps, "{:.1f}"),
        _ratio(new.num_request_steps - old.num_request_steps, num_steps, "{:.1f}"),
    ]


def _table(columns: list[str], *, num_left: int, title: str | None = None) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_left else "right")
    return table


def _share(part: float, whole: float) -> str:
    return _ratio(100 * part, whole, "{:.0f}%")


def _ratio(part: float, whole: float, form: str) -> str:
    return form.format(part / whole) if whole else "-"
