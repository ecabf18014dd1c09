"""A run: warm-up, arrivals, figures.

Runs that differ in how they speculate take turns, repeat by repeat: what a machine does meanwhile
meets all of them.

In a *closed loop* a batch of requests arrives at once. Its speed is
batch * (N - 1) / (T(N tokens) - T(1 token)), each time until the last request has ended: the tail
of the batch counts, its prompts do not. In an *open loop* requests arrive when a schedule says,
however slow the server is.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coppice.bench.clients import ClientProcesses, Played, Send
from coppice.bench.figures import (
    Goodput,
    failures_of,
    figures_of,
    median_of,
    overhead_of,
    served,
    spread_of,
)
from coppice.bench.outputs import OutputLog
from coppice.bench.request import RequestResult
from coppice.bench.schedule import Arrival
from shared.messages import PromptInfo
from shared.rpc.status import error_of

WARM_UP_TOKENS = 32
WARM_UP_ARRIVALS = 24
"""Of a schedule: so many of its first requests are sent at once before it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How the requests of a run speculate.

    Args:
        name: "off", "auto" or a shape of trees.
        keywords: Of `RequestOptions`.
    """

    name: str
    keywords: Mapping[str, Any] = field(default_factory=dict)


class Bench:
    """Runs, one at a time, on the same client processes.

    Args:
        keywords: Of `RequestOptions`, for every request.
        repeat: How often each run is repeated.
        outputs: What came out so far.
    """

    def __init__(
        self,
        clients: ClientProcesses,
        *,
        keywords: Mapping[str, Any],
        repeat: int,
        goodput: Goodput | None,
        outputs: OutputLog,
    ) -> None:
        self.info: PromptInfo | None = None
        self._clients = clients
        self._keywords = keywords
        self._repeat = repeat
        self._goodput = goodput
        self._outputs = outputs

    def closed(self, modes: Sequence[Mode], arrivals: Sequence[Arrival]) -> list[dict[str, Any]]:
        """Measure a batch of requests that arrive at once.

        Returns: figures by mode; `decode_tokens_per_second` is of the medians of the repeats.
        Raises: CoppiceError of the first request that failed.
        """
        first_only = _limited(arrivals, 1)
        for mode in modes:
            self._play(mode, _limited(arrivals, WARM_UP_TOKENS))
            self._play(mode, first_only)
        firsts_s: dict[str, list[float]] = {mode.name: [] for mode in modes}
        runs: dict[str, list[Played]] = {mode.name: [] for mode in modes}
        for mode in self._turns(modes):
            firsts_s[mode.name].append(self._play(mode, first_only).elapsed_s)
            runs[mode.name].append(self._play(mode, arrivals))
        return [
            self._closed_figures(mode, arrivals, firsts_s[mode.name], runs[mode.name])
            for mode in modes
        ]

    def _closed_figures(
        self, mode: Mode, arrivals: Sequence[Arrival], firsts_s: list[float], runs: list[Played]
    ) -> dict[str, Any]:
        figures = self._figures(arrivals, runs)
        first_s = statistics.median(firsts_s)
        whole_s = statistics.median(run.elapsed_s for run in runs)
        num_tokens = sum(len(request.token_ids) - 1 for request in served(runs[0].outcomes))
        rates = [_rate(num_tokens, run.elapsed_s - first_s) for run in runs]
        figures["spread"]["decode_tokens_per_second"] = spread_of(rates)
        return {
            "batch": len(arrivals),
            "speculation": mode.name,
            "decode_tokens_per_second": _rate(num_tokens, whole_s - first_s),
            "first_s": round(first_s, 4),
            **figures,
        }

    def open(
        self, modes: Sequence[Mode], label: Mapping[str, Any], arrivals: Sequence[Arrival]
    ) -> list[dict[str, Any]]:
        """Measure requests that arrive when they are due; those that fail are counted.

        Args:
            label: Names the run: "schedule", or "rate".
        Returns: figures by mode.
        Raises: CoppiceError of the first request of the warm-up that failed.
        """
        warm_up = [dataclasses.replace(each, at_s=0.0) for each in arrivals[:WARM_UP_ARRIVALS]]
        for mode in modes:
            self._play(mode, _limited(warm_up, WARM_UP_TOKENS))
        runs: dict[str, list[Played]] = {mode.name: [] for mode in modes}
        for mode in self._turns(modes):
            runs[mode.name].append(self._play(mode, arrivals, may_fail=True))
        return [
            {**label, "speculation": name, **self._figures(arrivals, played)}
            for name, played in runs.items()
        ]

    def _turns(self, modes: Sequence[Mode]) -> Iterator[Mode]:
        """Yield each mode as often as it is repeated, every other time in the opposite order."""
        for i in range(self._repeat):
            yield from reversed(modes) if i % 2 else modes

    def _figures(self, arrivals: Sequence[Arrival], runs: Sequence[Played]) -> dict[str, Any]:
        repeats = [figures_of(run.outcomes, run.elapsed_s, self._goodput) for run in runs]
        return {
            **median_of(repeats),
            **self._outputs.compare([(arrivals, run.outcomes) for run in runs]),
            "failures": failures_of(runs),
            "clients": overhead_of(runs),
            "repeats": len(runs),
            "spread": spread_of(repeats),
        }

    def _play(self, mode: Mode, arrivals: Sequence[Arrival], *, may_fail: bool = False) -> Played:
        keywords = {**self._keywords, **mode.keywords}
        sends = [Send(at_s=each.at_s, request=each.request(keywords)) for each in arrivals]
        played = self._clients.play(sends)
        for outcome in played.outcomes:
            if isinstance(outcome, RequestResult):
                self.info = outcome.info
            elif not may_fail:
                raise error_of(outcome)
        return played


def _limited(arrivals: Sequence[Arrival], max_new_tokens: int) -> list[Arrival]:
    return [dataclasses.replace(each, max_new_tokens=max_new_tokens) for each in arrivals]


def _rate(num_tokens: int, seconds: float) -> float | None:
    """Return tokens per second; None if there is nothing to divide."""
    return round(num_tokens / seconds, 1) if num_tokens and seconds > 0 else None
