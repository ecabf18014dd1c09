"""Named values: what Prometheus calls samples, as plain dictionaries.

    {'coppice_engine_rounds_total{source="device"}': 1024.0, ...}

A key is the sample's name with its labels, as it stands in the text that Prometheus reads. That
form travels between processes as it is, and is what `coppice top` and an administrator see.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from shared.metrics.tally import StageClock, Tally

Samples = dict[str, float]

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


def named(name: str, **labels: object) -> str:
    """Return the key of a sample."""
    if not labels:
        return name
    pairs = [f'{label}="{_escape(str(value))}"' for label, value in labels.items()]
    return f"{name}{{{','.join(pairs)}}}"


def parse_key(key: str) -> tuple[str, dict[str, str]]:
    """Return the name and the labels of a key that `named` made."""
    name, _, labels = key.partition("{")
    return name, {label: _unescape(value) for label, value in _LABEL.findall(labels)}


def counted(name: str, label: str, counts: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the samples of a counter with one label, from its counts by the label's value."""
    for value, count in counts.items():
        yield named(name, **{label: value}), float(count)


def stage_seconds(name: str, clock: StageClock) -> Iterator[tuple[str, float]]:
    """Yield the samples of a clock's stages, in seconds."""
    for stage, spent_ns in clock.ns.items():
        yield named(name, stage=stage), spent_ns / 1e9


def histogram(name: str, tally: Tally, **labels: object) -> Iterator[tuple[str, float]]:
    """Yield the samples of a histogram: cumulative buckets, count and sum."""
    total = 0
    for bound, count in zip((*tally.bounds, "+Inf"), tally.counts, strict=True):
        total += count
        yield named(f"{name}_bucket", **labels, le=bound), float(total)
    yield named(f"{name}_count", **labels), float(total)
    yield named(f"{name}_sum", **labels), tally.total


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], text)
