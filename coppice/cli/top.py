"""`coppice top`: a live view of workers, requests, acceptance, and where a round's time goes."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from typing import TYPE_CHECKING

from coppice.cli.options import add_admin_option, open_admin
from shared.errors import ConfigError

if TYPE_CHECKING:
    from coppice.admin import AdminClient
    from coppice.cli.admin_tables import Sample


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `top`."""
    parser = commands.add_parser(
        "top", help="watch workers, requests and rounds", allow_abbrev=False
    )
    add_admin_option(parser)
    parser.add_argument(
        "--interval-s", type=float, default=1.0, help="seconds between two looks (default: 1)"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one view and end, as it does where the output is no terminal",
    )
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Show a view of the last interval, again and again until Ctrl-C; once where the output is no
    terminal, which could not be overwritten.

    Raises: ConfigError for an interval that is none.
    """
    from rich.console import Group
    from rich.live import Live

    from coppice.cli.admin_tables import frame, print_table

    if not 0 < arguments.interval_s < threading.TIMEOUT_MAX:
        raise ConfigError(f"--interval-s is {arguments.interval_s:g}, expected more than 0")
    with open_admin(arguments) as client:
        before = sample(client)
        time.sleep(arguments.interval_s)
        now = sample(client)
        if arguments.once or not sys.stdout.isatty():
            print_table(*frame(before, now))
            return 0
        with Live(Group(*frame(before, now)), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(arguments.interval_s)
                before, now = now, sample(client)
                live.update(Group(*frame(before, now)), refresh=True)


def sample(client: AdminClient) -> Sample:
    """Ask the orchestrator how things stand."""
    from coppice.cli.admin_tables import Sample

    workers = tuple(client.call("ListWorkers").workers)
    return Sample(at_s=time.monotonic(), workers=workers, stats=client.call("Stats"))
