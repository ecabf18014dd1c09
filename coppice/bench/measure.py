"""A run: warm-up, arrivals, figures.

In a *closed loop* a batch of requests arrives at once. Its speed is
batch * (N - 1) / (T(N tokens) - T(1 token)), each time until the last request has ended: the tail
of the batch counts, its prompts do not. In an *open loop* requests arrive when a schedule says,
however slow the server is.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
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
    """Runs, one after the other, on the same client processes.

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

    def closed(self, mode: Mode, arrivals: Sequence[Arrival]) -> dict[str, Any]:
        """Measure a batch of requests that arrive at once.

        Returns: figures; `decode_tokens_per_second` is of the medians of the repeats.
        Raises: CoppiceError of the first request that failed.
        """
        first_only = _limited(arrivals, 1)
        self._play(mode, _limited(arrivals, WARM_UP_TOKENS))
        self._play(mode, first_only)
        firsts_s: list[float] = []
        runs: list[Played] = []
        for _ in range(self._repeat):
            firsts_s.append(self._play(mode, first_only).elapsed_s)
            runs.append(self._play(mode, arrivals))
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
        self, mode: Mode, label: Mapping[str, Any], arrivals: Sequence[Arrival]
    ) -> dict[str, Any]:
        """Measure requests that arrive when they are due; those that fail are counted.

        Args:
            label: Names the run: "schedule", or "rate".
        Raises: CoppiceError of the first request of the warm-up that failed.
        """
        warm_up = [dataclasses.replace(each, at_s=0.0) for each in arrivals[:WARM_UP_ARRIVALS]]
        self._play(mode, _limited(warm_up, WARM_UP_TOKENS))
        runs = [self._play(mode, arrivals, may_fail=True) for _ in range(self._repeat)]
        return {**label, "speculation": mode.name, **self._figures(arrivals, runs)}

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
