"""`coppice health`: exit code 0 if a service is healthy; the health check of containers."""

from __future__ import annotations

import argparse
import sys

from coppice.cli.options import add_tls_options, check_address, other_speech, tls_of
from coppice.health import HealthProbe
from shared.errors import ConfigError
from shared.rpc.health_names import HEALTH_SERVICES


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `health ADDRESS`."""
    parser = commands.add_parser("health", help="ask a service for its health", allow_abbrev=False)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument(
        "--service",
        default="",
        help="full service name = ready for work, e.g. coppice.v1.TargetService; "
        "empty = the process is alive (default)",
    )
    parser.add_argument("--timeout-s", type=float, default=3.0, help="seconds (default: 3)")
    add_tls_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the status; 0 if SERVING, else 1.

    Raises: ConfigError for an address, or a time, that is none.
    """
    check_address(arguments.address, "HOST:PORT")
    if not arguments.timeout_s > 0:
        raise ConfigError(f"--timeout-s is {arguments.timeout_s:g}, expected more than 0")
    tls = tls_of(arguments)
    with HealthProbe(arguments.address, tls=tls) as probe:
        status = probe.status(arguments.service, timeout_s=arguments.timeout_s)
    sys.stdout.write(status + "\n")
    if status == "UNREACHABLE":
        what = other_speech(arguments.address, tls)
        hint = "; of a gateway name its --health-port, or ask GET /health of its HTTP port"
        sys.stderr.write(
            f"coppice: {what + hint if what else f'nothing listens at {arguments.address}'}\n"
        )
    if status == "SERVICE_UNKNOWN":
        sys.stderr.write(
            f"coppice: {arguments.address} has no service {arguments.service!r}; full names are "
            f"{', '.join(HEALTH_SERVICES)}\n"
        )
    return 0 if status == "SERVING" else 1
