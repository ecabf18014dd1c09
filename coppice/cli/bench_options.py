"""Options of `coppice bench`, and what they ask for."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coppice.cli.options import ADMIN_TOKEN_VARIABLE
from coppice.stack.config import split_list
from shared.config.check import flag_name, parse_shape
from shared.errors import ConfigError

if TYPE_CHECKING:
    from coppice.bench.measure import Bench, Mode
    from coppice.bench.schedule import Arrival, Prompt
    from shared.messages import TreeShape

DEFAULT_CONCURRENCY = "1,4"
DEFAULT_NEW_TOKENS = 128
DEFAULT_SECONDS = 10.0
DEFAULT_REQUESTS = 16
DEFAULT_REPEAT = 3
"""Of a batch, whose time is short."""

_NOT_TIMELINE = (
    *("rate", "schedule", "repeat", "goodput", "processes", "connections", "admin"),
    "compare_outputs",
)

Measurement = Callable[["Bench"], list[dict[str, Any]]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add everything but the server's address."""
    _add_arrivals(parser)
    _add_requests(parser)
    _add_measuring(parser)


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse numbers out of range, and options that mean nothing together.

    Raises: ConfigError that names the option.
    """
    _check_numbers(arguments)
    _check_files(arguments)
    if arguments.seconds is not None and not arguments.rate:
        raise ConfigError("--seconds means something with --rate only")
    if arguments.requests is not None and arguments.timeline is None:
        raise ConfigError("--requests means something with --timeline only")
    if arguments.schedule:
        _refuse(arguments, ("prompts", "new_tokens"), "with --schedule, whose files say it")
    if arguments.timeline is not None:
        _refuse(arguments, _NOT_TIMELINE, "with --timeline")


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("new_tokens", "repeat", "processes", "connections", "requests"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"{flag_name(name)} is {value}, expected at least 1")
    if arguments.seconds is not None and not 0 < arguments.seconds < math.inf:
        raise ConfigError(f"--seconds is {arguments.seconds:g}, expected more than 0")


def _check_files(arguments: argparse.Namespace) -> None:
    for name in ("output", "plot", "timeline"):
        path = getattr(arguments, name)
        if path and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{flag_name(name)} {path}: there is no such folder to write to")
        if path:
            _check_writable(Path(path), f"{flag_name(name)} {path}")


def _check_writable(path: Path, said: str) -> None:
    """Find out before the measurement, which would be lost."""
    is_new = not path.exists()
    if not (is_new or path.is_file() or path.is_dir()):
        return  # a pipe or a device
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {said}: {error.strerror}") from error


def compared_files(arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the two files to compare.

    Raises: ConfigError unless there is nothing else on the command line.
    """
    match arguments.compare:
        case ["compare", before, after]:
            ours = {"compare", "run", "parser"}
            given = {
                name: value
                for name, value in vars(arguments).items()
                if name not in ours and value != arguments.parser.get_default(name)
            }
            if given:
                raise ConfigError(f"{flag_name(min(given))} means nothing with compare")
            return before, after
    raise ConfigError(
        f"{' '.join(arguments.compare)!r} is unexpected; expected options only, or "
        "compare A.json B.json"
    )


def is_open(arguments: argparse.Namespace) -> bool:
    """Return whether requests arrive whether or not others have ended."""
    return bool(arguments.rate or arguments.schedule)


def num_repeats(arguments: argparse.Namespace) -> int:
    """Return how often each run is repeated."""
    return arguments.repeat or (1 if is_open(arguments) else DEFAULT_REPEAT)


def new_tokens(arguments: argparse.Namespace) -> int:
    """Return the length of the outputs, where no schedule says it."""
    return arguments.new_tokens or DEFAULT_NEW_TOKENS


def concurrencies(arguments: argparse.Namespace) -> list[int]:
    """Return the sizes of the batches.

    Raises: ConfigError.
    """
    text = DEFAULT_CONCURRENCY if arguments.concurrency is None else arguments.concurrency
    parts = split_list(text)
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"--concurrency is {text!r}, expected a list of numbers as in 1,4,16")
    return [int(part) for part in parts]


def prompts_of(arguments: argparse.Namespace) -> list[Prompt]:
    """Return the prompts of the file, or the default ones.

    Raises: ConfigError.
    """
    from coppice.bench.schedule import DEFAULT_PROMPTS, read_prompts

    return read_prompts(arguments.prompts) if arguments.prompts else list(DEFAULT_PROMPTS)


def keywords_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of `RequestOptions` that all requests have."""
    return {
        "temperature": arguments.temperature,
        "ignore_eos": True,  # equal lengths make runs comparable
        "omit_text": not arguments.text,
    }


def modes_of(arguments: argparse.Namespace) -> list[Mode]:
    """Return the ways to speculate.

    Raises: ConfigError.
    """
    from coppice.bench.measure import Mode

    text = arguments.speculation
    if text is None:
        text = "auto" if is_open(arguments) else "off,auto"
    modes = []
    for name in dict.fromkeys(split_list(text)):
        if name == "off":
            modes.append(Mode(name=name, keywords={"speculation": False}))
        elif name == "auto":
            modes.append(Mode(name=name))
        elif "/" in name:
            shape = dataclasses.asdict(_shape(name))
            modes.append(Mode(name=name, keywords={"speculation": True, **shape}))
        else:
            raise ConfigError(
                f"--speculation is {text!r}, expected a list of off, auto and "
                "steps/topk/nodes as in off,3/1/4"
            )
    if not modes:
        raise ConfigError("--speculation is empty, expected a list of off, auto and shapes")
    return modes


def measurements_of(arguments: argparse.Namespace) -> Iterator[Measurement]:
    """Yield what to measure, in order: all arrivals, with every way to speculate.

    Raises: ConfigError.
    """
    modes = modes_of(arguments)
    if is_open(arguments):
        return _open(arguments, modes)
    return _closed(arguments, modes)


def _closed(arguments: argparse.Namespace, modes: list[Mode]) -> Iterator[Measurement]:
    from coppice.bench.measure import Bench
    from coppice.bench.schedule import at_once

    length = new_tokens(arguments)
    if length < 2:
        raise ConfigError(
            f"--new-tokens is {length}, expected at least 2: tokens after the first are counted"
        )
    prompts = prompts_of(arguments)
    for count in concurrencies(arguments):
        arrivals = at_once(prompts, count, max_new_tokens=length, seed=arguments.seed)
        yield partial(Bench.closed, modes=modes, arrivals=arrivals)


def _open(arguments: argparse.Namespace, modes: list[Mode]) -> Iterator[Measurement]:
    from coppice.bench.measure import Bench

    for label, arrivals in _runs(arguments):
        yield partial(Bench.open, modes=modes, label=label, arrivals=arrivals)


def _runs(arguments: argparse.Namespace) -> Iterator[tuple[dict[str, Any], list[Arrival]]]:
    """Yield the names of open runs, and their arrivals."""
    from coppice.bench.schedule import poisson, read_schedule

    for path in arguments.schedule or ():
        yield {"schedule": path}, read_schedule(path, seed=arguments.seed)
    if not arguments.rate:
        return
    prompts = prompts_of(arguments)
    seconds = arguments.seconds or DEFAULT_SECONDS
    for rate in _rates(arguments.rate):
        arrivals = poisson(
            prompts,
            rate=rate,
            seconds=seconds,
            max_new_tokens=new_tokens(arguments),
            seed=arguments.seed,
        )
        if not arrivals:
            raise ConfigError(
                f"--rate {rate:g}: nobody arrives within {seconds:g} s; raise --seconds"
            )
        yield {"rate": rate, "seconds": seconds}, arrivals


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in split_list(text)]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(f"--rate is {text!r}, expected requests per second as in 8,20")
    return rates


def _shape(name: str) -> TreeShape:
    try:
        return parse_shape(name)
    except ConfigError as error:
        raise ConfigError(f"--speculation: {error}") from error


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(arguments, name):
            raise ConfigError(f"{flag_name(name)} means nothing {why}")


def _add_arrivals(parser: argparse.ArgumentParser) -> None:
    arrivals = parser.add_argument_group("arrivals").add_mutually_exclusive_group()
    arrivals.add_argument(
        "--concurrency",
        metavar="N,...",
        help="batches of so many requests at once, one after the other "
        f"(default: {DEFAULT_CONCURRENCY})",
    )
    arrivals.add_argument(
        "--rate", metavar="R,...", help="requests per second on average, at random times"
    )
    arrivals.add_argument(
        "--schedule",
        nargs="+",
        metavar="FILE",
        help='JSON lists of {"at_s", "token_ids", "max_new_tokens"}, perhaps with "temperature"',
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"how long requests arrive at a --rate (default: {DEFAULT_SECONDS:g})",
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    requests = parser.add_argument_group("requests")
    requests.add_argument(
        "--prompts",
        metavar="FILE",
        help="a JSON list of texts or of lists of token ids; or a prompt per line, where a JSON "
        "string may hold newlines (default: a few beginnings of Python code)",
    )
    requests.add_argument(
        "--new-tokens",
        type=int,
        metavar="N",
        help=f"tokens of every output (default: {DEFAULT_NEW_TOKENS})",
    )
    requests.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    requests.add_argument(
        "--seed", type=int, default=0, help="of random arrivals and sampling (default: 0)"
    )
    requests.add_argument(
        "--speculation",
        metavar="off,auto,STEPS/TOPK/NODES,...",
        help="how to speculate, a list: each is measured. auto: as the server does "
        "(default: off,auto; at a --rate or by a --schedule: auto)",
    )
    requests.add_argument("--text", action="store_true", help="ask for text, not for ids alone")


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--repeat",
        type=int,
        metavar="N",
        help="show medians of so many repeats, and their spread (default: 3 of a batch, else 1)",
    )
    measuring.add_argument(
        "--goodput",
        metavar="LIMITS",
        help="count requests within limits of ttft, tpot, gap and request, as in "
        "ttft=200ms,tpot=10ms",
    )
    measuring.add_argument(
        "--processes", type=int, metavar="N", help="that send requests (default: by cores)"
    )
    measuring.add_argument(
        "--connections", type=int, metavar="N", help="of each of these processes (default: 1)"
    )
    measuring.add_argument(
        "--admin",
        default="",
        metavar="HOST:PORT",
        help="--admin-host and --admin-port of the orchestrator: show by how much the counters of "
        "its workers have grown",
    )
    measuring.add_argument(
        "--admin-token-file",
        default="",
        metavar="FILE",
        help=f"file with the token of an operator; or {ADMIN_TOKEN_VARIABLE}",
    )
    measuring.add_argument(
        "--compare-outputs", metavar="FILE", help="what --output wrote: are the outputs the same?"
    )
    measuring.add_argument("--output", metavar="FILE", help="write the figures as JSON")
    picture = measuring.add_mutually_exclusive_group()
    picture.add_argument(
        "--plot",
        metavar="FILE",
        help="write the speed of batches, with auto over the best of the others, else the time per "
        "token, as SVG",
    )
    picture.add_argument(
        "--timeline",
        nargs="?",
        const="",
        metavar="FILE",
        help="say where a round's time goes instead: a table, and a picture (SVG) if there is a "
        "FILE",
    )
    measuring.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"requests per measurement of a --timeline (default: {DEFAULT_REQUESTS})",
    )
