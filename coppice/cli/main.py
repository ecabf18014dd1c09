"""Parse the command line and run a subcommand. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from coppice import __version__
from shared.config.loader import suggestion
from shared.errors import EXIT_CONFIG, ConfigError, CoppiceError

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="coppice",
        description="Tree speculative decoding with draft and target as separate services.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"coppice {__version__}")
    # After main() has set what gRPC reads from the environment when it is imported.
    from coppice.cli import admin, bench, demo, generate, health, serve, top, up

    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (up, serve, generate, bench, demo, health, admin, top):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None = the process's.
    Returns: the exit code: 0, 1 = it failed, 2 = it was asked something impossible.
    """
    # gRPC's own log, in a format of its own; its errors reach us as exceptions.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        arguments, extras = build_parser().parse_known_args(argv)
        if extras:
            _refuse(arguments, extras[0])
        return int(arguments.run(arguments))
    except ConfigError as error:
        sys.stderr.write(f"coppice: {error}\n")
        return EXIT_CONFIG
    except CoppiceError as error:
        names = dict.fromkeys((error.code.name, error.reason))  # often the same
        where = f" ({error.field})" if error.field else ""
        sys.stderr.write(f"coppice: {' '.join(names)}{where}: {error.message}\n")
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return EXIT_FAILURE


def _refuse(arguments: argparse.Namespace, extra: str) -> None:
    parser: argparse.ArgumentParser = arguments.parser
    if not extra.startswith("-"):
        parser.error(f"unexpected argument {extra!r}")
    flag = extra.partition("=")[0]
    known = [name for name in parser._option_string_actions if name.startswith("--")]
    elsewhere = arguments.elsewhere(flag) if "elsewhere" in arguments else ""
    parser.error(f"unknown option {flag}{elsewhere or suggestion(flag, known)}")
