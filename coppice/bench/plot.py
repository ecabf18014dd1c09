"""Draw lines over labels as a small SVG, without a plotting library.

Where batches were measured with AUTO and without, the picture shows AUTO over the envelope of all
else: the grey area ends at the best of the others, values lie on a logarithmic scale, and below
each batch is what AUTO reaches of the best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from coppice.bench.compare import arrivals_of
from coppice.bench.envelope import AUTO, EnvelopePoint, envelope_of

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 88, 120, 36, 60
# Told apart also without colour vision (Okabe and Ito).
COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

Lines = Mapping[str, Mapping[str, float]]
"""Name of a line -> label below the picture -> value."""


def plot_runs(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG document: decode tokens per second of batches, else the time per token."""
    lines: dict[str, dict[str, float]] = {}
    if "batch" in runs[0]:
        for run in runs:
            line = lines.setdefault(run["speculation"], {})
            line[str(run["batch"])] = run["decode_tokens_per_second"] or 0.0
        return draw_plot(
            lines,
            title="decode tokens per second",
            below="requests at once",
            envelope=list(envelope_of(runs)),
        )
    for run in runs:
        for point in ("p50", "p99"):
            line = lines.setdefault(f"{run['speculation']} {point}", {})
            line[arrivals_of(run)] = (run["per_token_ms"] or {}).get(point, 0.0)
    return draw_plot(lines, title="ms per output token", below="arrivals")


def draw_plot(
    lines: Lines, *, title: str, below: str, envelope: Sequence[EnvelopePoint] = ()
) -> str:
    """Return an SVG document: the labels evenly spaced, in the order in which they appear.

    Args:
        below: What the labels are.
        envelope: Of the lines, whose labels are batches.
    """
    values = [value for line in lines.values() for value in line.values()]
    plot = _Axes(
        labels=list(dict.fromkeys(itertools.chain(*lines.values()))),
        top=_round_up(max(values) or 1.0),
        bottom=_round_down(min(values)) if envelope and min(values) > 0 else 0.0,
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        *_draw_envelope(plot, envelope),
        *plot.draw(below),
    ]
    for index, (name, line) in enumerate(lines.items()):
        color = COLORS[index % len(COLORS)]
        points = [(plot.x(label), plot.y(value)) for label, value in line.items()]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        legend_y = TOP + 16 * index
        parts += [
            f'<polyline points="{corners}" fill="none" stroke="{color}" '
            f'stroke-width="{4 if envelope and name == AUTO else 2}"/>',
            *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points),
            f'<rect x="{WIDTH - RIGHT + 12}" y="{legend_y - 9}" width="10" height="10" '
            f'fill="{color}"/><text x="{WIDTH - RIGHT + 28}" y="{legend_y}">{escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _draw_envelope(plot: _Axes, envelope: Sequence[EnvelopePoint]) -> Iterator[str]:
    if not envelope:
        return
    points = [(plot.x(str(point.batch)), plot.y(point.best)) for point in envelope]
    ground = HEIGHT - BOTTOM
    corners = [(points[0][0], ground), *points, (points[-1][0], ground)]
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    yield f'<polygon points="{text}" fill="#e8e8e8"/>'
    yield f'<text x="{LEFT - 8}" y="{ground + 34}" text-anchor="end">{AUTO} / best</text>'
    for (x, _), point in zip(points, envelope, strict=True):
        hint = f"{point.auto:.0f} of {point.best:.0f} tokens/s, {point.name}"
        yield (
            f'<text x="{x:.1f}" y="{ground + 34}" text-anchor="middle">{point.share:.2f}'
            f"<title>{escape(hint)}</title></text>"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """Where labels and values lie.

    Args:
        top, bottom: The largest value and the smallest; bottom 0: the scale is linear, else
            logarithmic.
    """

    labels: Sequence[str]
    top: float
    bottom: float = 0.0

    def x(self, label: str) -> float:
        steps = max(1, len(self.labels) - 1)
        return LEFT + (WIDTH - LEFT - RIGHT) * self.labels.index(label) / steps

    def y(self, value: float) -> float:
        part = value / self.top
        if self.bottom:
            part = math.log(max(value, self.bottom) / self.bottom) / math.log(self._span)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part

    @property
    def _span(self) -> float:
        return max(self.top / self.bottom, 2.0)

    @property
    def _marks(self) -> Iterator[float]:
        """Yield the values that have a line across the picture."""
        if not self.bottom:
            yield from (self.top * step / 4 for step in range(5))
            return
        doublings = math.ceil(math.log2(self._span) - 1e-9)
        step = max(1, math.ceil(doublings / 8))
        for power in range(0, doublings + 1, step):
            if self.bottom * 2**power <= self.top * 1.001:
                yield self.bottom * 2**power

    def draw(self, below: str) -> Iterator[str]:
        for value in self._marks:
            y = self.y(value)
            yield (
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="#dddddd"/><text x="{LEFT - 8}" y="{y + 4:.1f}" '
                f'text-anchor="end">{value:g}</text>'
            )
        for label in self.labels:
            yield (
                f'<text x="{self.x(label):.1f}" y="{HEIGHT - BOTTOM + 20}" '
                f'text-anchor="middle">{escape(label)}</text>'
            )
        yield (
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" '
            f'text-anchor="middle">{escape(below)}</text>'
        )


def _round_down(value: float) -> float:
    """Return the 1, 2 or 5 times a power of ten that is not above a value."""
    magnitude = 10.0 ** math.floor(math.log10(value))
    return next(magnitude * f for f in (5, 2, 1) if magnitude * f <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    """Return the next 1, 2, 4 or 8 times a power of ten, so that four steps are round numbers."""
    magnitude = 1.0
    while magnitude * 10 <= value:
        magnitude *= 10
    while magnitude > value > 0:
        magnitude /= 10
    return next(magnitude * f for f in (1, 2, 4, 8, 10) if magnitude * f >= value)
