"""`coppice admin`: what operators do to a running deployment."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from coppice.cli.options import add_admin_option, open_admin
from shared.logs import LEVELS

Act = Callable[[Any, argparse.Namespace], None]
"""(AdminClient, arguments): calls and prints."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `admin workers|drain|...`."""
    parser = commands.add_parser("admin", help="operate a running deployment", allow_abbrev=False)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def add(name: str, act: Act, help: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=help, allow_abbrev=False)
        add_admin_option(action)
        action.set_defaults(run=run, parser=action, act=act)
        return action

    add("workers", _workers, "list all workers")
    drain = add("drain", _drain, "have a worker take no new requests; running ones move or end")
    _add_worker(drain)
    drain.add_argument("--wait", action="store_true", help="return once it holds no request")
    _add_worker(add("undrain", _undrain, "have a worker take new requests again"))
    add("abort", _abort, "end a request").add_argument("request_id")
    level = add("log-level", _log_level, "set the level of a logger")
    level.add_argument("level", choices=LEVELS)
    level.add_argument(
        "--logger", default="", help="e.g. orchestrator.endpoints (default: the root)"
    )
    _add_worker(level, is_required=False)
    config = add("config", _config, "print the configuration of a process")
    _add_worker(config, is_required=False)
    profile = add("profile", _profile, "record steps of a worker's engine, into a file there")
    _add_worker(profile)
    profile.add_argument("--num-steps", type=int, default=0, help="steps to record (default: 20)")
    profile.add_argument("--stop", action="store_true", help="end the recording, print its file")
    stats = add("stats", _stats, "print sums over all requests")
    # Before the action argparse would take the value of an option for the action.
    for name in stats._option_string_actions:
        if name not in parser._option_string_actions:
            parser.add_argument(
                name,
                nargs="?",
                action=_Misplaced,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


def run(arguments: argparse.Namespace) -> int:
    """Call the operators' port and print what it says."""
    with open_admin(arguments) as client:
        arguments.act(client, arguments)
    return 0


class _Misplaced(argparse.Action):
    """An option of actions in front of the action."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        parser.error(
            f"{option_string} goes behind the action: coppice admin ACTION {option_string}"
        )


def _add_worker(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    said = "HOST:PORT as `coppice admin workers` prints it"
    if is_required:
        parser.add_argument("worker", metavar="WORKER", help=said)
    else:
        parser.add_argument("--worker", default="", help=f"{said} (default: the orchestrator)")


def _workers(client: Any, arguments: argparse.Namespace) -> None:
    from coppice.cli.admin_tables import print_table, workers_table

    print_table(workers_table(client.call("ListWorkers").workers))


def _drain(client: Any, arguments: argparse.Namespace) -> None:
    num_requests = client.call("Drain", worker=arguments.worker).num_requests
    _say(f"{arguments.worker} drains, with {num_requests} requests")
    if arguments.wait:
        client.wait_drained(arguments.worker)
        _say(f"{arguments.worker} holds no request")


def _undrain(client: Any, arguments: argparse.Namespace) -> None:
    client.call("Undrain", worker=arguments.worker)
    _say(f"{arguments.worker} takes new requests")


def _abort(client: Any, arguments: argparse.Namespace) -> None:
    client.call("Abort", request_id=arguments.request_id)
    _say(f"request {arguments.request_id} is ended")


def _log_level(client: Any, arguments: argparse.Namespace) -> None:
    client.call(
        "SetLogLevel", worker=arguments.worker, logger=arguments.logger, level=arguments.level
    )


def _config(client: Any, arguments: argparse.Namespace) -> None:
    for name, value in sorted(client.call("GetConfig", worker=arguments.worker).values.items()):
        _say(f"{name} = {value}")


def _profile(client: Any, arguments: argparse.Namespace) -> None:
    if arguments.stop:
        _say(client.call("StopProfile", worker=arguments.worker).path)
    else:
        reply = client.call("StartProfile", worker=arguments.worker, num_steps=arguments.num_steps)
        _say(f"{reply.path}, once the steps are done")


def _stats(client: Any, arguments: argparse.Namespace) -> None:
    from google.protobuf.json_format import MessageToJson

    stats = client.call("Stats")
    _say(
        MessageToJson(
            stats, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
