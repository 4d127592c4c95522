"""Writes log-log plots as SVG, by hand: no plotting library is needed, and the colours suit light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 300, 230
LEFT, TOP, RIGHT, BOTTOM = 62, 30, 14, 46
LEGEND_HEIGHT = 34
TICK_SPACING = 18
# Mid-tones, of similar contrast against white and against near-black.
INK, GRID = "#7d8590", "#7d859055"
BLUE, ORANGE = "#3b82f6", "#e0701a"


@dataclass(frozen=True)
class Series:
    """One line: its name in the legend, its colour, whether it is dashed, and its (x, y) points."""

    name: str
    color: str
    dashed: bool
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One pair of axes; ``ticks`` are the places and labels along x, the decades along y are found."""

    title: str
    x_label: str
    y_label: str
    ticks: Sequence[tuple[float, str]]
    series: Sequence[Series]


@dataclass(frozen=True)
class _Scale:
    """Maps the logarithm of [low, high] to [start, end] in pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def _text(x: float, y: float, words: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _stroke(series: Series) -> str:
    dashes = ' stroke-dasharray="5 3"' if series.dashed else ""
    return f'stroke="{series.color}" stroke-width="1.8" fill="none"{dashes}'


def _decade(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -4 < exponent < 4 else f"1e{exponent}"


def _panel(panel: Panel, decades: tuple[int, int], x0: float, y0: float) -> list[str]:
    left, right = x0 + LEFT, x0 + WIDTH - RIGHT
    top, bottom = y0 + TOP, y0 + HEIGHT - BOTTOM
    places = [place for place, _ in panel.ticks]
    x = _Scale(min(places) / 1.25, max(places) * 1.25, left, right)
    y = _Scale(10.0 ** decades[0], 10.0 ** decades[1], bottom, top)
    parts = [_text((left + right) / 2, y0 + 18, panel.title, extra=' font-weight="600"')]
    for exponent in range(decades[0], decades[1] + 1):
        height = y(10.0**exponent)
        parts += [_line(left, height, right, height, f'stroke="{GRID}"')]
        parts += [_text(left - 6, height + 4, _decade(exponent), "end")]
    written = -math.inf
    for place, label in panel.ticks:
        parts.append(_line(x(place), top, x(place), bottom, f'stroke="{GRID}"'))
        # A label that would run into the one before is left out; its line stays.
        if x(place) - written > TICK_SPACING:
            parts.append(_text(x(place), bottom + 16, label))
            written = x(place)
    parts.append(_text((left + right) / 2, bottom + 34, panel.x_label))
    turned = f' transform="rotate(-90 {x0 + 16:.1f} {(top + bottom) / 2:.1f})"'
    parts.append(_text(x0 + 16, (top + bottom) / 2, panel.y_label, extra=turned))
    for series in panel.series:
        pixels = [(x(a), y(b)) for a, b in series.points]
        parts.append(f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in pixels)}" {_stroke(series)}/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.4" fill="{series.color}"/>' for a, b in pixels]
    return parts


def figure(rows: Sequence[Sequence[Panel]]) -> str:
    """Draws rows of panels under one legend; the panels of a row share their y axis.

    Args:
        rows: Panels from left to right, rows from top to bottom.

    Returns:
        The text of an SVG file.
    """
    width = WIDTH * max(len(row) for row in rows)
    height = LEGEND_HEIGHT + HEIGHT * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11.5" fill="{INK}">'
    ]
    legend = {series.name: series for row in rows for panel in row for series in panel.series}
    slot = width / max(len(legend), 1)
    for i, series in enumerate(legend.values()):
        start = slot * i + 16
        parts += [_line(start, 18, start + 28, 18, _stroke(series)), _text(start + 36, 22, series.name, "start")]
    for i, row in enumerate(rows):
        values = [value for panel in row for series in panel.series for _, value in series.points]
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        for j, panel in enumerate(row):
            parts += _panel(panel, (low, max(high, low + 1)), WIDTH * j, LEGEND_HEIGHT + HEIGHT * i)
    return "\n".join([*parts, "</svg>"]) + "\n"
