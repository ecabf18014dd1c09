"""Draw tokens per second over concurrency as a small SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from coppice.bench import CellResult

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 120, 36, 48
# Told apart also without colour vision (Okabe and Ito).
COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def draw_plot(results: Sequence[CellResult], *, title: str) -> str:
    """Return an SVG document: one line per mode, concurrencies evenly spaced."""
    concurrencies = sorted({result.concurrency for result in results})
    modes = list(dict.fromkeys(result.mode for result in results))
    top = _round_up(max(result.tokens_per_second for result in results))

    def x(concurrency: int) -> float:
        steps = max(1, len(concurrencies) - 1)
        return LEFT + (WIDTH - LEFT - RIGHT) * concurrencies.index(concurrency) / steps

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
    for concurrency in concurrencies:
        parts.append(
            f'<text x="{x(concurrency):.1f}" y="{HEIGHT - BOTTOM + 20}" '
            f'text-anchor="middle">{concurrency}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" '
        'text-anchor="middle">concurrent requests</text>'
    )
    for index, mode in enumerate(modes):
        color = COLORS[index % len(COLORS)]
        points = sorted(
            (x(r.concurrency), y(r.tokens_per_second)) for r in results if r.mode == mode
        )
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{color}"/>' for px, py in points
        ]
        legend_y = TOP + 16 * index
        parts.append(
            f'<rect x="{WIDTH - RIGHT + 12}" y="{legend_y - 9}" width="10" height="10" '
            f'fill="{color}"/><text x="{WIDTH - RIGHT + 28}" y="{legend_y}">{escape(mode)}</text>'
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
