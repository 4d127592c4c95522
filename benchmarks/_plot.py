"""Writes plots as SVG, log-log or linear in y: without a plotting library, in colours for light and dark pages."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 300, 230
LEFT, TOP, RIGHT, BOTTOM = 62, 30, 14, 46
LEGEND_HEIGHT = 34
# Of a label: about the width of a digit, and the least room between two.
DIGIT, GAP = 7.0, 3.0
# Along a linear y axis, at most.
LINEAR_SPACES = 5
# Fewer decades than these are divided further.
BARE_DECADES = 3
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
    """One pair of axes; ``ticks`` are the rising places and labels along x, those along y are found."""

    title: str
    x_label: str
    y_label: str
    ticks: Sequence[tuple[float, str]]
    series: Sequence[Series]
    linear: bool = False


@dataclass(frozen=True)
class _Scale:
    """Maps [low, high], or its logarithm, to [start, end] in pixels."""

    low: float
    high: float
    start: float
    end: float
    linear: bool = False

    def __call__(self, value: float) -> float:
        if self.linear:
            share = (value - self.low) / (self.high - self.low)
        else:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def _text(x: float, y: float, words: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _stroke(series: Series) -> str:
    dashes = ' stroke-dasharray="5 3"' if series.dashed else ""
    return f'stroke="{series.color}" stroke-width="1.8" fill="none"{dashes}'


def _label(place: float) -> str:
    if place == 0 or 1e-4 < abs(place) < 1e4:
        return f"{place:g}"
    digit, exponent = f"{place:.0e}".split("e")
    return f"{digit}e{int(exponent)}"


def _ticks(values: Sequence[float], linear: bool) -> list[float]:
    """Returns round places along y; the values lie between the first and the last."""
    low, high = min(values), max(values)
    if linear:
        least = ((high - low) or 1.0) / LINEAR_SPACES
        decade = 10.0 ** math.floor(math.log10(least))
        step = next(n * decade for n in (1, 2, 5, 10) if n * decade >= least)
        first, last = math.floor(low / step), math.ceil(high / step)
        return [step * n for n in range(first, max(last, first + 1) + 1)]
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    exponents = range(first, max(last, first + 1) + 1)
    if len(exponents) > BARE_DECADES:
        return [10.0**exponent for exponent in exponents]
    places = [n * 10.0**exponent for exponent in exponents for n in (1, 2, 5)]
    start = max(bisect_right(places, low) - 1, 0)
    end = max(bisect_left(places, high), start + 1)
    return places[start : end + 1]


def _panel(panel: Panel, heights: Sequence[float], x0: float, y0: float) -> list[str]:
    left, right = x0 + LEFT, x0 + WIDTH - RIGHT
    top, bottom = y0 + TOP, y0 + HEIGHT - BOTTOM
    places = [place for place, _ in panel.ticks]
    x = _Scale(min(places) / 1.25, max(places) * 1.25, left, right)
    y = _Scale(heights[0], heights[-1], bottom, top, panel.linear)
    parts = [_text((left + right) / 2, y0 + 18, panel.title, extra=' font-weight="600"')]
    for height in heights:
        parts += [_line(left, y(height), right, y(height), f'stroke="{GRID}"')]
        parts += [_text(left - 6, y(height) + 4, _label(height), "end")]
    written = math.inf
    for place, label in reversed(panel.ticks):
        parts.append(_line(x(place), top, x(place), bottom, f'stroke="{GRID}"'))
        # A label that would run into the next is left out; its line stays.
        half = DIGIT * len(label) / 2
        if x(place) + half < written - GAP:
            parts.append(_text(x(place), bottom + 16, label))
            written = x(place) - half
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
        heights = _ticks(values, row[0].linear)
        for j, panel in enumerate(row):
            parts += _panel(panel, heights, WIDTH * j, LEGEND_HEIGHT + HEIGHT * i)
    return "\n".join([*parts, "</svg>"]) + "\n"
