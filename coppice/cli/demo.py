"""`coppice demo`: the whole thing with the bundled models, with speculation and without.

The last line of stdout is one JSON object; the exit code is 1 if the two outputs differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from coppice.cli.generate import Shown, show
from coppice.cli.render import TokenPrinter

if TYPE_CHECKING:
    from coppice.client import Client

PROMPT = "import json\n\n\ndef load_json(filename):"
WARM_UP_TOKENS = 8


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `demo`."""
    parser = commands.add_parser(
        "demo",
        help="run the bundled models, with speculation and without",
        allow_abbrev=False,
    )
    parser.add_argument("--prompt", default=PROMPT, help="text to go on from")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--page-size", type=int, default=16, help="default: 16")
    parser.add_argument("--num-steps", type=int, default=0, help="tree depth (default: auto)")
    parser.add_argument("--topk", type=int, default=0, help="tree width (default: auto)")
    parser.add_argument(
        "--num-draft-tokens", type=int, default=0, help="nodes per round (default: auto)"
    )
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Start the stack, stream twice, compare."""
    from coppice.cli.progress import StackProgress
    from coppice.client import Client
    from coppice.stack import ServiceFailedError, Stack
    from coppice.stack.config import stack_config

    started = time.perf_counter()
    given = {
        "port": 0,
        "device": arguments.device,
        "page_size": arguments.page_size,
        "num_steps": arguments.num_steps,
        "topk": arguments.topk,
        "num_draft_tokens": arguments.num_draft_tokens,
    }
    progress = StackProgress(shows_log=False)
    stack = Stack(stack_config(given), on_log=progress.on_log, on_state=progress.on_state)
    try:
        with progress:
            stack.start()
        with Client(stack.address) as client:
            report = _compare(client, arguments, started)
    except ServiceFailedError as error:
        sys.stderr.write(f"coppice: {error}\n")
        return 1
    finally:
        stack.stop()
    sys.stdout.write(json.dumps(report) + "\n")
    return 0 if report["identical"] else 1


def _compare(client: Client, arguments: argparse.Namespace, started: float) -> dict[str, Any]:
    keywords = {
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "ignore_eos": True,  # the same number of tokens either way
    }
    _warm_up(client, arguments.prompt)
    printer = TokenPrinter(sys.stdout, shows_tree=True)
    _headline("With speculation: " + printer.legend(sys.stdout))
    sys.stdout.write(arguments.prompt)
    fast = show(client.stream(arguments.prompt, speculation=True, **keywords), printer)
    _headline("Without")
    sys.stdout.write(arguments.prompt)
    plain_printer = TokenPrinter(sys.stdout, shows_tree=False)
    plain = show(client.stream(arguments.prompt, speculation=False, **keywords), plain_printer)
    is_identical = fast.token_ids == plain.token_ids and fast.text == plain.text
    _headline(_verdict(fast, plain, is_identical=is_identical))
    return {
        "tokens_per_second": round(fast.tokens_per_second, 2),
        "plain_tokens_per_second": round(plain.tokens_per_second, 2),
        "accept_length": round(fast.finish.speculation.accept_length, 3),
        "identical": is_identical,
        "num_tokens": len(fast.token_ids),
        "time_to_first_token_s": round(fast.first_token_at - started, 2),
    }


def _warm_up(client: Client, prompt: str) -> None:
    """Run both paths once: first calls allocate and, on a GPU, compile."""
    for is_speculating in (True, False):
        events = client.stream(
            prompt, speculation=is_speculating, max_new_tokens=WARM_UP_TOKENS, ignore_eos=True
        )
        show(events, None)


def _verdict(fast: Shown, plain: Shown, *, is_identical: bool) -> str:
    ratio = fast.tokens_per_second / plain.tokens_per_second
    speed = (
        f"{ratio:.2f} times as fast" if ratio >= 1 else f"SLOWER here, {ratio:.2f} times as fast"
    )
    same = "the same text" if is_identical else "DIFFERENT text, which is a bug"
    return (
        f"{fast.tokens_per_second:.0f} against {plain.tokens_per_second:.0f} tokens per second: "
        f"{speed}, {same}; {fast.finish.speculation.accept_length:.2f} tokens per round"
    )


def _headline(text: str) -> None:
    sys.stdout.write(f"\n--- {text} ---\n")
    sys.stdout.flush()
