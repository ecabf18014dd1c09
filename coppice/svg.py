"""Pictures as SVG text: spans of time on a strip, and a bar for each kind of them."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _ROW, _LEFT = 1200, 18, 420  # pixels
_SATURATION = 0.6  # of all colors
IDLE, UNNAMED = "#dddddd", "#888888"


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that took time, microseconds from the picture's beginning on."""

    name: str
    start_us: float
    end_us: float

    @property
    def us(self) -> float:
        """Return how long it took."""
        return self.end_us - self.start_us


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A line below the strip.

    Args:
        label: Written behind the bar.
    """

    name: str
    us: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A strip of spans and the bars that explain it.

    Args:
        idle: Name of what is no span; its bar is grey, like the strip where nothing is.
    """

    title: str
    spans: Sequence[Span]
    bars: Sequence[Bar]
    idle: str = ""


def color_of(hue: float, lightness: float = 0.55) -> str:
    """Return a color as "#rrggbb", which every renderer knows; hsl() is for browsers only.

    Args:
        hue: Degrees.
        lightness: 0..1.
    """
    red, green, blue = colorsys.hls_to_rgb(hue / 360 % 1, lightness, _SATURATION)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def draw_charts(charts: Sequence[Chart], *, colors: Mapping[str, str] | None = None) -> str:
    """Return an SVG document: charts one below the other, one color per name in all of them.

    Args:
        colors: Name -> "#rrggbb"; other names get one in the order in which they appear.
    """
    names = dict.fromkeys(bar.name for chart in charts for bar in chart.bars)
    palette = {name: color_of(i * 360 * 0.618) for i, name in enumerate(names)} | dict(colors or {})
    parts: list[str] = []
    top = 0
    for chart in charts:
        parts += _chart(chart, top, palette)
        top += 100 + len(chart.bars) * _ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" '
        f'font-family="monospace" font-size="11">\n'
        f'<rect width="{_WIDTH}" height="{top}" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _chart(chart: Chart, top: int, palette: Mapping[str, str]) -> list[str]:
    def color(name: str) -> str:
        return IDLE if name == chart.idle else palette.get(name, UNNAMED)

    strip = _WIDTH - 20
    whole_us = max(span.end_us for span in chart.spans)
    parts = [
        _text(10, top + 20, chart.title),
        _rect(10, top + 30, strip, 40, "#eeeeee", chart.idle),
    ]
    for span in chart.spans:
        us = span.us
        left, width = 10 + span.start_us / whole_us * strip, us / whole_us * strip
        hint = f"{span.name}: {us:.1f} us at {span.start_us:.1f}"
        parts.append(_rect(left, top + 30, width, 40, color(span.name), hint))
    longest = max(bar.us for bar in chart.bars)
    for i, bar in enumerate(chart.bars):
        y = top + 90 + i * _ROW
        width = bar.us / longest * (_WIDTH - _LEFT - 270)
        parts.append(_text(10, y + 12, bar.name))
        parts.append(_rect(_LEFT, y, width, _ROW - 3, color(bar.name), bar.name))
        parts.append(_text(_LEFT + width + 6, y + 12, bar.label))
    return parts


def _rect(left: float, top: float, width: float, height: float, fill: str, hint: str) -> str:
    return (
        f'<rect x="{left:.2f}" y="{top:.0f}" width="{max(width, 0.2):.2f}" height="{height}" '
        f'fill="{fill}"><title>{escape(hint)}</title></rect>'
    )


def _text(left: float, top: float, text: str) -> str:
    return f'<text x="{left:.0f}" y="{top:.0f}" fill="#000000">{escape(text)}</text>'
