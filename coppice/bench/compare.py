"""Two results of benchmarks side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

Run = Mapping[str, Any]

FIGURES = (
    "decode_tokens_per_second",
    "tokens_per_second",
    "first_token_ms",
    "per_token_ms",
    "gap_ms",
    "request_ms",
    "goodput",
    "accept_length",
    "root_only_share",
    "failed",
)
_ARRIVALS = frozenset({"batch", "schedule", "rate"})
_QUANTILES = ("p50", "p90", "p99", "p99.9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A figure of two runs; `change` is of the second over the first, None if the first is 0."""

    name: str
    before: float
    after: float

    @property
    def change(self) -> float | None:
        """Return the relative difference."""
        return self.after / self.before - 1 if self.before else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs of the same arrivals."""

    title: str
    differences: Sequence[Difference]


def read_result(path: str) -> dict[str, Any]:
    """Read what `--output` wrote, or a bare list of runs in its form.

    Returns: a document with "runs".
    Raises: ConfigError.
    """
    try:
        document = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if isinstance(document, list):
        document = {"runs": document}
    if isinstance(document, dict) and "runs" not in document:
        document["runs"] = document.get("rows")
    runs = document.get("runs") if isinstance(document, dict) else None
    if not isinstance(runs, list) or not runs or not all(map(_is_run, runs)):
        raise ConfigError(f"{path} holds no runs; expected what `coppice bench --output` writes")
    return dict(document)


def _is_run(value: Any) -> bool:
    """Return whether that says what arrived, as each run of a benchmark does."""
    return isinstance(value, dict) and not _ARRIVALS.isdisjoint(value)


def compare(before: Sequence[Run], after: Sequence[Run]) -> list[Pair]:
    """Pair runs of the same arrivals, first those that speculate alike, and compare them."""
    left = list(after)
    partners: dict[int, Run] = {}
    for same in (_full_name, arrivals_of):
        for index, run in enumerate(before):
            match = next((each for each in left if same(each) == same(run)), None)
            if index not in partners and match is not None:
                partners[index] = match
                left = [each for each in left if each is not match]
    return [_pair(before[index], partners[index]) for index in sorted(partners)]


def arrivals_of(run: Run) -> str:
    """Return what arrived, in words."""
    if "batch" in run:
        return f"batch of {run['batch']}"
    if "schedule" in run:
        return Path(str(run["schedule"])).name
    return f"{run.get('rate', 0):g} a second"


def speculation_of(run: Run) -> str:
    """Return how a run speculates, in words."""
    if "chain" in run:  # of an engine without trees
        return f"{run['chain']}/1/{run['chain'] + 1}" if run["chain"] else "off"
    return str(run.get("speculation", ""))


def outputs_of(document: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the digests of a document's outputs, none if it holds no digests."""
    outputs = document.get("outputs")
    if not isinstance(outputs, dict) or not all(isinstance(v, str) for v in outputs.values()):
        return {}
    return outputs


def identical_outputs(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many requests of two documents are alike, and how many of them ended alike."""
    one, other = (outputs_of(document) for document in (before, after))
    both = one.keys() & other.keys()
    return len(both), sum(one[key] == other[key] for key in both)


def _full_name(run: Run) -> tuple[str, str]:
    return arrivals_of(run), speculation_of(run)


def _pair(before: Run, after: Run) -> Pair:
    old, new = _numbers(before), _numbers(after)
    ways = dict.fromkeys((speculation_of(before), speculation_of(after)))
    return Pair(
        title=f"{arrivals_of(before)}, speculation {' against '.join(ways)}",
        differences=[
            Difference(name=name, before=old[name], after=new[name]) for name in old if name in new
        ],
    )


def _numbers(run: Run) -> dict[str, float]:
    """Return the figures of a run by name; quantiles may be a list."""
    found: dict[str, float] = {}
    for name in FIGURES:
        value = run.get(name)
        if isinstance(value, list):
            value = dict(zip(_QUANTILES, value, strict=False))
        if isinstance(value, Mapping):
            found |= {f"{name} {point}": each for point, each in value.items()}
        elif isinstance(value, int | float):
            found[name] = value
    return found
