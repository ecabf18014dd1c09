"""`coppice generate`: stream a completion to the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from coppice.cli.options import add_server_option, credentials_of, require_server
from coppice.cli.render import TokenPrinter, print_stats, stats_rows
from coppice.cli.request_options import add_request_options, refuse_without_trees, request_keywords
from shared.errors import CoppiceError
from shared.messages import FinishInfo, GenerateEvent, PromptInfo, TokenDelta


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `generate`."""
    parser = commands.add_parser(
        "generate", help="stream a completion to the terminal", allow_abbrev=False
    )
    parser.add_argument("prompt", help="text to go on from; - reads standard input")
    add_server_option(parser)
    parser.add_argument(
        "--timeout-s", type=float, help="deadline of the whole request, seconds (default: none)"
    )
    parser.add_argument(
        "--show-tree",
        action="store_true",
        help="colour accepted draft tokens and bonus tokens (brackets where there are no colours); "
        "every round has a tree, also where none would pay, and there must be a draft",
    )
    parser.add_argument("--stats", action="store_true", help="say what it took, on stderr")
    add_request_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Stream the completion to stdout."""
    from coppice.client import Client

    keywords = request_keywords(arguments)
    if arguments.show_tree:
        if arguments.no_speculation:
            refuse_without_trees("--show-tree")
        keywords["speculation"] = True
    credentials = credentials_of(arguments)
    require_server(arguments.server, credentials)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    printer = TokenPrinter(sys.stdout, shows_tree=arguments.show_tree)
    if arguments.show_tree:
        sys.stderr.write(printer.legend(sys.stderr) + "\n")
    try:
        with Client(arguments.server, token=credentials.token, tls=credentials.tls) as client:
            shown = show(client.stream(prompt, timeout_s=arguments.timeout_s, **keywords), printer)
    except (CoppiceError, KeyboardInterrupt) as error:
        printer.end_line()  # what went wrong is said on a line of its own
        if arguments.show_tree and isinstance(error, CoppiceError) and error.reason == "NO_DRAFT":
            error.message = f"--show-tree asks for trees, leave it out here: {error.message}"
        raise
    sys.stdout.write("\n")
    if arguments.stats:
        rows = stats_rows(
            shown.info, shown.finish, num_tokens=len(shown.token_ids), elapsed_s=shown.elapsed_s
        )
        print_stats(sys.stderr, rows)
    return 0


@dataclass(kw_only=True)
class Shown:
    """A request that was streamed to its end.

    Args:
        first_token_at: time.perf_counter() at the first token.
        elapsed_s: From sending the request to its end.
    """

    info: PromptInfo
    finish: FinishInfo
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    first_token_at: float = 0.0
    elapsed_s: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Return output tokens over the whole time, prefill included."""
        return len(self.token_ids) / self.elapsed_s


def show(events: Iterable[GenerateEvent], printer: TokenPrinter | None) -> Shown:
    """Print a stream as it comes and keep what was in it."""
    info: PromptInfo | None = None
    finish: FinishInfo | None = None
    token_ids: list[int] = []
    texts: list[str] = []
    first_token_at = 0.0
    started = time.perf_counter()
    for event in events:
        match event:
            case PromptInfo():
                info = event
            case TokenDelta():
                if not token_ids:
                    first_token_at = time.perf_counter()
                token_ids += event.token_ids
                texts.append(event.text)
                if printer is not None:
                    printer.write(event)
            case FinishInfo():
                finish = event
    assert info is not None and finish is not None, "a stream without an error has both"
    return Shown(
        info=info,
        finish=finish,
        token_ids=token_ids,
        text="".join(texts),
        first_token_at=first_token_at,
        elapsed_s=time.perf_counter() - started,
    )
