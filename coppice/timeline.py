"""Where a round's time goes on a running server: medians per stage, and how busy engines are."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coppice.bench.figures import quantile
from coppice.bench.measure import Mode
from coppice.bench.request import TimedClient, run_in_turn
from coppice.bench.schedule import Prompt, at_once
from coppice.credentials import NO_CREDENTIALS, Credentials
from coppice.svg import Bar, Chart, Span, color_of
from shared.errors import ConfigError
from shared.messages import RoundTimes

WARM_UP_ROUNDS = 4
"""First rounds of a request that are left out: the draft may still be reading the prompt."""
COMPUTING = {
    "target": ("target: forward", "target: sample"),
    "draft": ("draft: extend", "draft: grow"),
}
"""Stages in which an engine's device computes."""
IN_ENGINES = frozenset(
    {
        *("target: pack", "target: busy device", "target: read", "target: commit"),
        *("draft: pack", "draft: read", "draft: tree"),
        *("target: busy engine", "draft: busy engine"),  # steps of other requests
        *itertools.chain(*COMPUTING.values()),
    }
)
"""Stages of the engines' steps."""
_HUES = {"target": (195.0, 275.0), "draft": (75.0, 165.0), "orchestrator": (15.0, 45.0)}
_STAGES = {
    "target": (
        *("hop to it", "channel", "front", "busy engine", "queue", "pack", "busy device"),
        *("forward", "sample", "read", "commit", "answer", "hop back"),
    ),
    "draft": (
        *("hop to it", "channel", "front", "busy engine", "features", "queue", "pack", "extend"),
        *("grow", "read", "tree", "answer", "hop back"),
    ),
    "orchestrator": ("commit", "order"),
}
_LIGHTNESS = (0.42, 0.66, 0.54)  # stages next to each other differ


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage over all rounds that have it, microseconds.

    Args:
        share: Of the time of all rounds.
    """

    name: str
    num_rounds: int
    median_us: float
    p95_us: float
    share: float


@dataclass(frozen=True, kw_only=True)
class TimelineResult:
    """Rounds of one mode at one concurrency.

    Args:
        round_us: Median, from an order to verify to the next one.
        outside_us: Median of what a round spends outside of the engines' steps.
        stages: In the order of a round.
        busy_shares: Of each kind of engine: the share of the rounds' time in which it computed
            some of them.
    """

    mode: str
    concurrency: int
    num_rounds: int
    round_us: float
    outside_us: float
    stages: Sequence[Stage]
    busy_shares: Mapping[str, float]

    @property
    def title(self) -> str:
        """Return the whole in a line."""
        busy = ", ".join(f"{kind} busy {share:.0%}" for kind, share in self.busy_shares.items())
        return (
            f"{self.mode}, {self.concurrency} at once: {self.round_us:.0f} us a round, "
            f"{self.outside_us:.0f} us outside of the engines; {busy}; {self.num_rounds} rounds"
        )


async def measure_timelines(
    address: str,
    *,
    modes: Sequence[Mode],
    concurrencies: Sequence[int],
    prompts: Sequence[Prompt],
    requests_per_cell: int,
    max_new_tokens: int,
    seed: int,
    keywords: Mapping[str, Any],
    credentials: Credentials = NO_CREDENTIALS,
) -> list[TimelineResult]:
    """Time the rounds of every mode at every concurrency.

    Args:
        requests_per_cell: At least the concurrency is run.
        keywords: Of `RequestOptions`, in every mode.
        credentials: What is shown to the server.
    Raises: CoppiceError of the first request that fails, ConfigError if requests are too short.
    """
    results = []
    async with TimedClient(address, credentials=credentials) as client:
        for concurrency, mode in itertools.product(concurrencies, modes):
            count = max(concurrency, requests_per_cell)
            options = {**keywords, **mode.keywords, "round_times": True}
            arrivals = at_once(prompts, count, max_new_tokens=max_new_tokens, seed=seed)
            sent = [arrival.request(options) for arrival in arrivals]
            await run_in_turn(client, sent[:concurrency], concurrency)  # warm up
            requests = await run_in_turn(client, sent, concurrency)
            rounds = [times for r in requests for times in r.finish.round_times[WARM_UP_ROUNDS:-1]]
            if not rounds:
                raise ConfigError(
                    f"no request of {mode.name} took more than {WARM_UP_ROUNDS + 1} rounds; "
                    "raise --new-tokens"
                )
            results.append(summarize(mode.name, concurrency, rounds))
    return results


def summarize(mode: str, concurrency: int, rounds: Sequence[RoundTimes]) -> TimelineResult:
    """Turn rounds into medians."""
    spans = [spans_of(times) for times in rounds]
    outside_us = [sum(span.us for span in each if span.name not in IN_ENGINES) for each in spans]
    return TimelineResult(
        mode=mode,
        concurrency=concurrency,
        num_rounds=len(rounds),
        round_us=statistics.median(each[-1].end_us - each[0].start_us for each in spans),
        outside_us=statistics.median(outside_us),
        stages=_stages_of(spans),
        busy_shares=_busy_shares(list(itertools.chain(*spans))),
    )


def _stages_of(rounds: Sequence[Sequence[Span]]) -> list[Stage]:
    durations: dict[str, list[float]] = {name: [] for name in _in_order(rounds)}
    for span in itertools.chain(*rounds):
        durations[span.name].append(span.us)
    total_us = sum(map(sum, durations.values()))
    return [
        Stage(
            name=name,
            num_rounds=len(values),
            median_us=statistics.median(values),
            p95_us=quantile(values, 0.95),
            share=sum(values) / total_us,
        )
        for name, values in durations.items()
    ]


def _busy_shares(spans: Sequence[Span]) -> dict[str, float]:
    wall_us = _union_us(spans)
    busy_us = {
        kind: _union_us(span for span in spans if span.name in names)
        for kind, names in COMPUTING.items()
    }
    return {kind: us / wall_us for kind, us in busy_us.items() if us}


def spans_of(times: RoundTimes) -> list[Span]:
    """Return the stages of a round, microseconds of the server's clock."""
    spans = []
    begin_ns = times.begin_ns
    for stage in times.stages:
        span = Span(name=stage.name, start_us=begin_ns / 1e3, end_us=stage.end_ns / 1e3)
        spans.append(span)
        begin_ns = stage.end_ns
    return spans


def stage_colors() -> dict[str, str]:
    """Return the color of every stage, the same in every picture: a range of hues per service."""
    colors = {}
    for service, names in _STAGES.items():
        first, last = _HUES[service]
        for i, name in enumerate(names):
            hue = first + (last - first) * i / (len(names) - 1)
            colors[f"{service}: {name}"] = color_of(hue, _LIGHTNESS[i % len(_LIGHTNESS)])
    return colors


def chart(result: TimelineResult) -> Chart:
    """Return a round made of the stages' medians, and a bar per stage."""
    ends = list(itertools.accumulate(stage.median_us for stage in result.stages))
    return Chart(
        title=result.title,
        spans=[
            Span(name=stage.name, start_us=end - stage.median_us, end_us=end)
            for stage, end in zip(result.stages, ends, strict=True)
        ],
        bars=[
            Bar(
                name=stage.name,
                us=stage.median_us,
                label=f"{stage.median_us:.0f} us, p95 {stage.p95_us:.0f} us, {stage.share:.1%}",
            )
            for stage in result.stages
        ],
    )


def _in_order(rounds: Sequence[Sequence[Span]]) -> list[str]:
    """Return the names of all stages; one that few rounds have stands where those have it."""
    order: list[str] = []
    for spans in rounds:
        place = 0
        for span in spans:
            if span.name not in order:
                order.insert(place, span.name)
            place = order.index(span.name) + 1
    return order


def _union_us(spans: Iterable[Span]) -> float:
    """Return how long at least one of the spans was under way."""
    total = end = 0.0
    for span in sorted(spans, key=lambda span: span.start_us):
        total += max(0.0, span.end_us - max(end, span.start_us))
        end = max(end, span.end_us)
    return total
