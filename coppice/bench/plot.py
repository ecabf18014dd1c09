"""Draw lines over labels as a small SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from coppice.bench.compare import arrivals_of

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 120, 36, 48
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
        return draw_plot(lines, title="decode tokens per second", below="requests at once")
    for run in runs:
        for point in ("p50", "p99"):
            line = lines.setdefault(f"{run['speculation']} {point}", {})
            line[arrivals_of(run)] = (run["per_token_ms"] or {}).get(point, 0.0)
    return draw_plot(lines, title="ms per output token", below="arrivals")


def draw_plot(lines: Lines, *, title: str, below: str) -> str:
    """Return an SVG document: the labels evenly spaced, in the order in which they appear.

    Args:
        below: What the labels are.
    """
    labels = list(dict.fromkeys(label for line in lines.values() for label in line))
    top = _round_up(max(value for line in lines.values() for value in line.values()) or 1.0)

    def x(label: str) -> float:
        steps = max(1, len(labels) - 1)
        return LEFT + (WIDTH - LEFT - RIGHT) * labels.index(label) / steps

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for step in range(5):
        value = top * step / 4
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="#dddddd"/><text x="{LEFT - 8}" y="{y(value) + 4:.1f}" '
            f'text-anchor="end">{value:g}</text>'
        )
    for label in labels:
        parts.append(
            f'<text x="{x(label):.1f}" y="{HEIGHT - BOTTOM + 20}" '
            f'text-anchor="middle">{escape(label)}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" '
        f'text-anchor="middle">{escape(below)}</text>'
    )
    for index, (name, line) in enumerate(lines.items()):
        color = COLORS[index % len(COLORS)]
        points = [(x(label), y(value)) for label, value in line.items()]
        corners = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(
            f'<polyline points="{corners}" fill="none" stroke="{color}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{color}"/>' for px, py in points
        ]
        legend_y = TOP + 16 * index
        parts.append(
            f'<rect x="{WIDTH - RIGHT + 12}" y="{legend_y - 9}" width="10" height="10" '
            f'fill="{color}"/><text x="{WIDTH - RIGHT + 28}" y="{legend_y}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _round_up(value: float) -> float:
    """Return the next 1, 2, 4 or 8 times a power of ten, so that four steps are round numbers."""
    magnitude = 1.0
    while magnitude * 10 <= value:
        magnitude *= 10
    while magnitude > value > 0:
        magnitude /= 10
    return next(magnitude * f for f in (1, 2, 4, 8, 10) if magnitude * f >= value)
