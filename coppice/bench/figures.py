"""Requests -> figures: quantiles in milliseconds, rates, goodput; medians and spreads of repeats.

Figures are nested dictionaries of numbers, as they are written to JSON.

    first token   from sending a request to its first token
    per token     from its first token to its last one, per token after the first
    gap           between a delta and the next one of the request
    request       from sending a request to its last token
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coppice.bench.clients import Outcome, Played
from coppice.bench.request import RequestResult
from shared.errors import ConfigError
from shared.messages import FinishReason, SpeculationStats

POINTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
GAP_POINTS = {**POINTS, "p99.9": 0.999}
LATE_MS = 10.0
"""Arrivals later than this are not the arrivals that were asked for."""
BUSY_SHARE = 0.8
"""A client process that computes more of the time adds waiting of its own to what it measures."""

_LIMITS: dict[str, Callable[[RequestResult], float]] = {
    "ttft": lambda request: request.time_to_first_token_s,
    "tpot": lambda request: request.time_per_output_token_s,
    "gap": lambda request: max(request.gaps_s, default=0.0),
    "request": lambda request: request.time_to_last_token_s,
}
_LIMIT = re.compile(r"(\w+)=(\d+(?:\.\d*)?|\.\d+)(ms|s)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Limits that a good request keeps.

    Args:
        limits_s: "ttft" (first token), "tpot" (per token), "gap" (longest), "request" -> seconds.
    """

    limits_s: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Goodput:
        """Parse limits as in "ttft=200ms,tpot=10ms".

        Raises: ConfigError that names the option.
        """
        limits_s = {}
        for part in text.split(","):
            match = _LIMIT.fullmatch(part.strip())
            if not match or match[1] not in _LIMITS:
                raise ConfigError(
                    f"--goodput is {text!r}, expected limits of {', '.join(_LIMITS)} as in "
                    "ttft=200ms,tpot=10ms"
                )
            limits_s[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
        return cls(limits_s=limits_s)

    def is_good(self, request: RequestResult) -> bool:
        """Return whether a request kept every limit."""
        return all(_LIMITS[name](request) <= limit for name, limit in self.limits_s.items())


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the least value that a fraction of the values does not exceed; 0 without values."""
    if not values:
        return 0.0
    return sorted(values)[max(math.ceil(len(values) * fraction) - 1, 0)]  # the nearest rank


def quantiles_ms(values_s: Sequence[float], points: Mapping[str, float]) -> dict[str, float] | None:
    """Return quantiles of times in milliseconds; None without values."""
    if not values_s:
        return None
    ranked = sorted(values_s)
    return {name: round(1e3 * quantile(ranked, point), 3) for name, point in points.items()}


def served(outcomes: Sequence[Outcome]) -> list[RequestResult]:
    """Return the requests that did not fail."""
    return [outcome for outcome in outcomes if isinstance(outcome, RequestResult)]


def failures_of(runs: Sequence[Played]) -> dict[str, int]:
    """Return how many requests failed, by reason."""
    outcomes = itertools.chain(*(run.outcomes for run in runs))
    return dict(Counter(e.reason for e in outcomes if not isinstance(e, RequestResult)))


def figures_of(
    outcomes: Sequence[Outcome], elapsed_s: float, goodput: Goodput | None
) -> dict[str, Any]:
    """Return the figures of one run.

    Args:
        elapsed_s: From its beginning to the end of its last request.
    """
    requests = served(outcomes)
    num_tokens = _num_tokens(requests)
    figures = {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(requests),
        "ended_by_context": sum(
            request.finish.reason is FinishReason.CONTEXT_LENGTH for request in requests
        ),
        "tokens": num_tokens,
        "elapsed_s": round(elapsed_s, 4),
        "tokens_per_second": round(num_tokens / elapsed_s, 1),
        "requests_per_second": round(len(requests) / elapsed_s, 3),
        **_latencies_of(requests),
        **_speculation_of(requests),
    }
    if goodput is not None:
        good = [request for request in requests if goodput.is_good(request)]
        figures["goodput"] = {
            "share": round(len(good) / len(outcomes), 4),
            "requests_per_second": round(len(good) / elapsed_s, 3),
            "tokens_per_second": round(_num_tokens(good) / elapsed_s, 1),
        }
    return figures


def _num_tokens(requests: Sequence[RequestResult]) -> int:
    return sum(len(request.token_ids) for request in requests)


def _latencies_of(requests: Sequence[RequestResult]) -> dict[str, Any]:
    gaps_s = list(itertools.chain(*(request.gaps_s for request in requests)))
    return {
        "first_token_ms": quantiles_ms([r.time_to_first_token_s for r in requests], POINTS),
        "per_token_ms": quantiles_ms([r.time_per_output_token_s for r in requests], POINTS),
        "gap_ms": quantiles_ms(gaps_s, GAP_POINTS),
        "request_ms": quantiles_ms([r.time_to_last_token_s for r in requests], POINTS),
    }


def _speculation_of(requests: Sequence[RequestResult]) -> dict[str, Any]:
    """Return means over all rounds, None without rounds; and rounds by trees."""
    stats = [request.finish.speculation for request in requests]
    num_rounds = sum(stat.num_rounds for stat in stats)
    if not num_rounds:
        return {"accept_length": None, "root_only_share": None}
    num_accepted = sum(stat.num_accepted_drafts for stat in stats)
    num_root_only = sum(stat.num_root_only_rounds for stat in stats)
    return {
        "accept_length": round(1 + num_accepted / num_rounds, 3),
        "root_only_share": round(num_root_only / num_rounds, 4),
        "num_resting_rounds": sum(stat.num_resting_rounds for stat in stats),
        "rounds_by_tree_size": _rounds_by_tree_size(stats),
    }


def overhead_of(runs: Sequence[Played]) -> dict[str, float]:
    """Return what the clients themselves did to the measurement, the worst of the runs."""
    lateness_s = list(itertools.chain(*(run.lateness_s for run in runs)))
    return {
        "late_ms_p99": round(1e3 * quantile(lateness_s, 0.99), 3),
        "cpu_share_max": round(max(share for run in runs for share in run.cpu_shares), 3),
    }


def warning_of(overhead: Mapping[str, float], *, is_batch: bool) -> str:
    """Return what to say if the clients were too slow to be trusted; empty: they were not.

    Args:
        is_batch: Requests are all due at once, so most are late by how long sending them takes.
    """
    problems = []
    if overhead["late_ms_p99"] > LATE_MS and not is_batch:
        problems.append(
            f"1% of the arrivals was sent {overhead['late_ms_p99']:.0f} ms late or more"
        )
    if overhead["cpu_share_max"] > BUSY_SHARE:
        problems.append(f"a client process computed {overhead['cpu_share_max']:.0%} of the time")
    if not problems:
        return ""
    return f"{', and '.join(problems)}: raise --processes, or measure from another machine"


def median_of(repeats: Sequence[Any]) -> Any:
    """Return the median of every number of nested figures; what is no number is the first's."""
    return _merge(repeats, _median)


def spread_of(repeats: Sequence[Any]) -> Any:
    """Return the least and the largest of every number of nested figures."""
    return _merge(repeats, lambda values: [min(values), max(values)])


def _median(values: Sequence[float]) -> float:
    median = round(statistics.median(values), 4)
    is_count = all(isinstance(each, int) for each in values)
    return int(median) if is_count and median == int(median) else median


def _merge(repeats: Sequence[Any], merge: Callable[[list[float]], Any]) -> Any:
    there = [each for each in repeats if each is not None]
    if not there:
        return None
    if isinstance(there[0], Mapping):
        names = dict.fromkeys(itertools.chain(*there))
        return {name: _merge([each.get(name) for each in there], merge) for name in names}
    return merge(there)


def _rounds_by_tree_size(stats: Iterable[SpeculationStats]) -> dict[str, int]:
    """Return how many rounds had trees of so many nodes, roots included; sizes as in JSON."""
    rounds: Counter[int] = Counter()
    for stat in stats:
        rounds.update(dict(enumerate(stat.tree_size_histogram)))
    return {str(size): count for size, count in sorted(rounds.items()) if count}
