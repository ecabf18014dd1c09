"""How long a client waits when a worker dies or hangs: the longest gap between two of its tokens.

Runs stacks of real processes with the default timeouts, streams one request at a time, harms a
worker in the middle of it, and compares the output with the plain one. With one target its spare
engine, which stands by before anything happens, must load the model; with two the other one takes
over.

    python -m benchmarks.pauses --repeat 9 --output benchmarks/results/pauses_cpu.json
    python -m benchmarks.pauses --targets 2 --events "target killed,target hangs" --repeat 3
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import describe_machine
from coppice import Client, TokenDelta
from coppice.stack import StackConfig
from coppice.stack.config import stack_config
from tests.e2e.serving import Server
from tests.processes import wait_for

PROMPT = "def read_config(path):\n"
HARM_AFTER = 30
"""Tokens."""
RECOVER_TIMEOUT_S = 120.0
EVENTS: dict[str, tuple[str, int]] = {
    "nothing": ("", 0),
    "target killed": ("target", signal.SIGKILL),
    "target hangs": ("target", signal.SIGSTOP),
    "draft killed": ("draft", signal.SIGKILL),
    "draft hangs": ("draft", signal.SIGSTOP),
}
"""Role whose engine gets a signal."""
_HEADER = "| event | targets | repeats | median pause s | longest s | round s | identical |"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Args:
        median_pause_s: Of the longest gaps between two deltas of each output after the event.
        round_s: Median gap before the event.
        identical: Share of outputs equal to the plain one, token by token.
        pauses_s: One per repeat.
    """

    event: str
    num_targets: int
    median_pause_s: float
    longest_pause_s: float
    round_s: float
    identical: float
    pauses_s: list[float]


@dataclasses.dataclass(slots=True)
class Output:
    """What one request gave.

    Args:
        arrivals_s: Of each delta, monotonic.
        harmed_at_s: When the worker was harmed, monotonic.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    arrivals_s: list[float] = dataclasses.field(default_factory=list)
    harmed_at_s: float = 0.0

    @property
    def gaps_before_s(self) -> list[float]:
        """Return the gaps between deltas before the event."""
        times = [at for at in self.arrivals_s if at < self.harmed_at_s]
        return [after - before for before, after in zip(times, times[1:], strict=False)]

    @property
    def pause_s(self) -> float:
        """Return the longest gap that ended after the event."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max(after - before for before, after in pairs if after > self.harmed_at_s)


def main() -> None:
    """Measure what the flags ask for."""
    args = _parse()
    rows: list[Row] = []
    machine = describe_machine() if args.output else {}
    for num_targets in map(int, args.targets.split(",")):
        with Server(_config(args, num_targets)) as server:
            _wait_whole(server)
            plain = _stream(server, args.max_new_tokens, speculation=False).token_ids
            for event in args.events.split(","):
                rows.append(_measure(server, event, num_targets, plain, args.repeat))
                if args.output:
                    results = {**machine, "rows": [dataclasses.asdict(row) for row in rows]}
                    Path(args.output).write_text(json.dumps(results, indent=1) + "\n")
    _print(rows)
    if any(row.identical < 1 for row in rows):
        sys.exit("a fault changed an output: that is a bug")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--targets", default="1,2", help="how many there are, comma-separated")
    parser.add_argument("--events", default=",".join(EVENTS), help="comma-separated")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=240)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", default="", help="file to write, JSON")
    return parser.parse_args()


def _config(args: argparse.Namespace, num_targets: int) -> StackConfig:
    given = {"device": args.device, "num_targets": num_targets, "num_drafts": 1, "port": 0}
    return stack_config(given)


def _measure(server: Server, event: str, num_targets: int, plain: list[int], repeat: int) -> Row:
    role, number = EVENTS[event]
    outputs = []
    for _ in range(repeat):
        outputs.append(
            _stream(server, len(plain), harm=lambda: _harm(server, role, number) if role else None)
        )
        _wait_whole(server)
    pauses_s = [round(output.pause_s, 3) for output in outputs]
    return Row(
        event=event,
        num_targets=num_targets,
        median_pause_s=statistics.median(pauses_s),
        longest_pause_s=max(pauses_s),
        round_s=round(statistics.median(g for out in outputs for g in out.gaps_before_s), 4),
        identical=sum(output.token_ids == plain for output in outputs) / repeat,
        pauses_s=pauses_s,
    )


def _stream(
    server: Server,
    num_tokens: int,
    *,
    speculation: bool | None = None,
    harm: Callable[[], object] = lambda: None,
) -> Output:
    """Stream one request; do harm when it has some tokens, without keeping its reader waiting."""
    output = Output()
    thread: threading.Thread | None = None
    with Client(server.address, max_retries=100) as client:
        events = client.stream(
            PROMPT, max_new_tokens=num_tokens, ignore_eos=True, speculation=speculation
        )
        for event in events:
            if not isinstance(event, TokenDelta):
                continue
            output.arrivals_s.append(time.monotonic())
            output.token_ids += event.token_ids
            if thread is None and len(output.token_ids) >= HARM_AFTER:
                output.harmed_at_s = time.monotonic()
                thread = threading.Thread(target=harm)
                thread.start()
    if thread is not None:
        thread.join()
    return output


def _harm(server: Server, role: str, number: int) -> None:
    """Send a signal to the engine of the worker that holds the request."""
    names = [name for name in server.workers if name.startswith(role)]
    busy = [name for name in names if server.info(name).load.num_running > 0]
    os.kill(server.engine((busy or names)[0]), number)


def _wait_whole(server: Server) -> None:
    """Wait until every worker is ready, holds nothing and has a spare engine."""
    engines = [name for name in server.workers if _is_stopped(server, name)]
    for name in engines:
        before = server.num_engines_lost(name)
        wait_for(
            lambda name=name, before=before: server.num_engines_lost(name) > before,
            RECOVER_TIMEOUT_S,
        )
    time.sleep(1.0)  # who was killed just now still counts as ready
    server.wait_paired()
    server.check_idle()
    for name in server.workers:
        wait_for(lambda name=name: server.has_spare(name), RECOVER_TIMEOUT_S)


def _is_stopped(server: Server, name: str) -> bool:
    try:
        stat = Path(f"/proc/{server.engine(name)}/stat").read_text()
    except (AssertionError, ValueError, FileNotFoundError):
        return False
    return stat.rpartition(") ")[2].startswith("T")


def _print(rows: list[Row]) -> None:
    lines = [_HEADER, "|---|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row.event} | {row.num_targets} | {len(row.pauses_s)} | {row.median_pause_s:.2f} "
            f"| {row.longest_pause_s:.2f} | {row.round_s:.3f} | {row.identical:.0%} |"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
