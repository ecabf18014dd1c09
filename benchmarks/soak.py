"""Hours of mixed load and faults: every output is its plain one, and no process grows.

Two targets, two drafts and an orchestrator with default settings, on the bundled models. Requests
of many kinds arrive at random; 20 to 60 s after the stack is whole again, another fault of
tests/e2e/fault_schedules.py happens. In the first and the last tenth of the time faults may end any
process. In between they end target-0 and draft-0 only, and the orchestrator, target-1 and draft-1
live through all other faults (resets, cuts, short stops, torn words, others' deaths): they show
whether memory grows.

    python -m benchmarks.soak --minutes 120 --output benchmarks/results/soak_cpu.json

With `--stack`, options of `coppice up` as JSON (with the tables "target" and "draft"), there are no
faults unless `--faults` asks for them, which need two workers of each role: as long a load,
cancellations included, on a stack of any kind, on a GPU for one.

    python -m benchmarks.soak --minutes 60 --rate 20 --stack '{"device": "cuda"}'
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.soak_load import REQUESTS, Load
from benchmarks.soak_memory import Sampler, growth
from coppice.stack.config import stack_config
from shared.config import DraftConfig, TargetConfig
from tests.e2e.fault_schedules import FAULTS, NUM_OF_ROLE, PARTS, Scene
from tests.e2e.harm import HarmedStack, harmed_stack
from tests.e2e.serving import generate_alone, running

GAP_S = (20.0, 60.0)
HOLD_S = (2.0, 20.0)
"""How long a fault without an end of its own goes on."""
SHORT_STOPS_S = (0.2, 1.0, 2.0)
"""Of processes that must live on: after 5 to 10 s they would be killed."""
FREE_PART = 0.1
"""Of the time, at the beginning and at the end, in which every process may be killed."""
GENTLE = (
    "stop a target",
    "stop a draft",
    "cut a target off",
    "cut a draft off",
    "slow target",
    "slow draft",
    "reset a target",
    "reset a draft",
)
"""Faults that end nobody, but for who is stopped for long."""
DEADLY = ("kill the orchestrator", "kill all workers")
VICTIM = {"target": "target-0", "draft": "draft-0"}
END_TIMEOUT_S = 180.0
WARM_UP_PART = 1 / 8
"""Of the time: what a process does before, caches that fill, does not count."""
MIN_LIFE_PART = 0.5
MIN_LIFE_S = 1800.0
"""Growth is judged of processes that live for more than half of the time, and for so long."""
_HEADER = (
    "| process | minutes | RSS MiB, first and last quarter | per hour "
    "| anonymous | per hour | fds | threads |"
)


@dataclass(slots=True, kw_only=True)
class SoakScene(Scene):
    """A scene in which the orchestrator, target-1 and draft-1 may be spared.

    Args:
        spares: Nothing that happens may end those.
        is_gentle: What happens is one of GENTLE.
    """

    spares: bool = False
    is_gentle: bool = False

    def worker(self, role: str) -> str:
        """Choose a worker of a role."""
        if self.spares and not self.is_gentle:
            return VICTIM[role]
        return f"{role}-{self.rng.randrange(NUM_OF_ROLE)}"

    def stop(self, name: str) -> None:
        """Stop a part of a service, for a moment if it must live on."""
        if not self.spares or name in VICTIM.values():
            Scene.stop(self, name)
            return
        part = self.rng.choice(PARTS)
        self.stack.signal_part(name, part, signal.SIGSTOP)
        time.sleep(self.rng.choice(SHORT_STOPS_S))
        self.stack.signal_part(name, part, signal.SIGCONT)


class Faults:
    """Faults in random order, each kind as often as any other, for a given time.

    Args:
        gap_s: Seconds from a stack that is whole to the next fault, at least and at most.
    """

    def __init__(
        self, stack: HarmedStack, length_s: float, gap_s: tuple[float, float], rng: random.Random
    ) -> None:
        self._stack = stack
        self._length_s = length_s
        self._gap_s = gap_s
        self._rng = rng
        self._deck: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []
        """Times at which the stack did not become whole again."""

    def play(self, note: Callable[[], None]) -> None:
        """Let faults happen until time is up; call `note` after each."""
        began_s = time.monotonic()
        while True:
            gap_s = self._rng.uniform(*self._gap_s)
            passed_s = time.monotonic() - began_s
            if passed_s + gap_s > self._length_s:
                time.sleep(max(0.0, self._length_s - passed_s))
                return
            time.sleep(gap_s)
            part = (passed_s + gap_s) / self._length_s
            self._strike(spares=FREE_PART < part < 1 - FREE_PART)
            note()

    def _strike(self, *, spares: bool) -> None:
        name = self._draw(spares=spares)
        try:
            scene = SoakScene(
                stack=self._stack, rng=self._rng, spares=spares, is_gentle=name in GENTLE
            )
            with scene.healers:
                FAULTS[name].strike(scene)
                time.sleep(self._rng.uniform(*HOLD_S))
            self._stack.wait_paired()
            self.counts[name] += 1
        except Exception as error:
            self.failures.append(f"{time.strftime('%H:%M:%S')} {name}: {error!r}"[:4000])

    def _draw(self, *, spares: bool) -> str:
        while True:
            if not self._deck:
                self._deck = list(FAULTS)
                self._rng.shuffle(self._deck)
            name = self._deck.pop()
            if spares and name in DEADLY:
                continue
            if self._stack.host.is_private or not FAULTS[name].needs_private:
                return name


class Quiet:
    """No faults, for a given time."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []

    def play(self, note: Callable[[], None]) -> None:
        """Wait; call `note` every minute."""
        ends_s = time.monotonic() + self._length_s
        while (left_s := ends_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 60.0))
            note()


def main() -> None:
    """Run what the flags ask for."""
    args = _parse()
    length_s = 60 * args.minutes
    results: dict[str, Any] = {**describe_machine(), "began": time.strftime("%F %T")}
    given = {"num_targets": NUM_OF_ROLE, "num_drafts": NUM_OF_ROLE, "port": 0, "device": "cpu"}
    has_faults, tables = args.faults or args.stack is None, {}
    if args.stack is not None:
        given = (given if has_faults else {"port": 0, "http_port": 0}) | json.loads(args.stack)
        tables = {"target": TargetConfig(**given.pop("target", {}))}
        tables["draft"] = DraftConfig(**given.pop("draft", {}))
    config = stack_config(given, **tables)
    log = open(args.log, "w") if args.log else None
    tracebacks: list[str] = []
    with harmed_stack(config) if has_faults else running(config) as stack:
        stack.wait_paired()
        plain = generate_alone(stack.address, list(REQUESTS.values()))
        sampler = Sampler(stack)
        is_harmed = isinstance(stack, HarmedStack)
        rng = random.Random(args.seed)
        faults = Faults(stack, length_s, args.gaps, rng) if is_harmed else Quiet(length_s)
        address = stack.front_address if is_harmed else stack.address

        def note() -> None:
            lines, stack.log = stack.log, []
            tracebacks.extend(line for line in lines if "Traceback" in line)
            if log is not None:
                log.write("\n".join([*lines, ""]))
                log.flush()
            results.update(_results(sampler, load, faults, tracebacks, length_s))
            _write(args.output, results)

        with sampler.sampling():
            load = Load(address, plain, args.rate, random.Random(args.seed + 1))
            faults.play(note)
            load.finish(END_TIMEOUT_S)
        note()
        stack.check_idle()
        if isinstance(stack, HarmedStack):
            stack.check_nothing_left()
    # The stack has ended, and whoever ran it has checked that no process and no file is left.
    results |= {"pages_free": True, "nothing_left": True, "ended": time.strftime("%F %T")}
    _write(args.output, results)
    _print(results)
    if results["failures"] or results["not_flat"] or tracebacks:
        sys.exit("an output was wrong, a process grew, or something was left: that is a bug")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=0.3, help="requests per second")
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument(
        "--stack", help="options of coppice up, JSON; without --faults there are none"
    )
    parser.add_argument("--faults", action="store_true", help="beside --stack: faults all the same")
    parser.add_argument(
        "--gaps",
        type=_seconds,
        default=GAP_S,
        metavar="LEAST,MOST",
        help="seconds from a stack that is whole to the next fault (default: 20,60)",
    )
    parser.add_argument("--log", default="", help="file for what the services write")
    parser.add_argument("--output", default="", help="file to write, JSON")
    return parser.parse_args()


def _seconds(text: str) -> tuple[float, float]:
    least, most = map(float, text.split(","))
    return least, most


def _results(
    sampler: Sampler, load: Load, faults: Faults | Quiet, tracebacks: list[str], length_s: float
) -> dict[str, Any]:
    warm_up_s = WARM_UP_PART * length_s
    least_s = MIN_LIFE_PART * length_s
    if isinstance(faults, Faults):
        least_s = max(MIN_LIFE_S, least_s)
    lives = [life for life in list(sampler.lives) if life.length_s > least_s]
    summaries = [summary for life in lives if (summary := life.summary(warm_up_s))]
    return {
        "requests": dict(load.counts),
        "faults": dict(faults.counts),
        "failures": [*load.failures, *faults.failures],
        "tracebacks": list(tracebacks),
        "cores": round(sampler.cores, 2),
        "not_flat": [text for summary in summaries for text in growth(summary)],
        "long_lived": summaries,
        "lives": [
            {"role": life.role, "pid": life.pid, "minute_rss_anonymous_mib": life.per_minute()}
            for life in list(sampler.lives)
        ],
    }


def _write(path: str, results: dict[str, Any]) -> None:
    if path:
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in results.items()]
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _print(results: dict[str, Any]) -> None:
    lines = [_HEADER, "|---|---|---|---|---|---|---|---|"]
    for row in results["long_lived"]:
        rss, anonymous, fds, threads = (
            row[name] for name in ("rss_mib", "anonymous_mib", "num_fds", "num_threads")
        )
        lines.append(
            f"| {row['role']} | {row['minutes']:.0f} "
            f"| {rss['first_quarter']:.1f}, {rss['last_quarter']:.1f} "
            f"| {rss['slope_per_hour']:+.2f} "
            f"| {anonymous['first_quarter']:.1f}, {anonymous['last_quarter']:.1f} "
            f"| {anonymous['slope_per_hour']:+.2f} "
            f"| {fds['first_quarter']:.1f}, {fds['last_quarter']:.1f} "
            f"| {threads['first_quarter']:.1f}, {threads['last_quarter']:.1f} |"
        )
    lines += [f"{name}: {results[name]}" for name in ("requests", "faults", "cores", "failures")]
    lines += [f"not flat: {text}" for text in results["not_flat"]]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
