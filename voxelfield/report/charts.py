"""Charts as numbers that the page's template draws as SVG.

Own SVG rather than matplotlib's: a page needs about two kilobytes for a chart instead of thirty, its colours follow the
reader's light or dark mode, and a run needs no further package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from voxelfield.report.history import Curve

WIDTH, HEIGHT = 400, 230
"""Size of every chart, in the units in which its elements are placed."""

LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34
"""Room around the plotted area, for the axes' labels."""

MOST_SERIES = 8
"""Number of line colours, and thus of curves per chart."""

_MAX_POINTS = 300
_MAX_MARKS = 40


@dataclass(frozen=True)
class Tick:
    """A labelled place on an axis, in the chart's units."""

    place: float
    label: str


@dataclass(frozen=True)
class Mark:
    """A point that names its value when it is pointed at."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Line:
    """A curve as drawn.

    Attributes:
        label: Its name.
        points: ``x,y`` of each point, in SVG syntax.
        marks: Some of the points.
        last: Its last value, in words.
    """

    label: str
    points: str
    marks: tuple[Mark, ...]
    last: str


@dataclass(frozen=True)
class LineChart:
    """Curves over steps.

    Attributes:
        title: What it shows.
        unit: Unit of the values, or an empty string.
        lines: The curves.
        x_ticks: Labelled steps.
        y_ticks: Labelled values.
        summary: The chart in words, for those who do not see it.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    summary: str


@dataclass(frozen=True)
class Bar:
    """A bar of a histogram, in the chart's units."""

    x: float
    y: float
    width: float
    height: float
    text: str


@dataclass(frozen=True)
class Histogram:
    """A histogram as drawn.

    Attributes:
        title: What it shows.
        unit: Unit of the values.
        bars: One for each range.
        mean: Where the mean is.
        x_ticks: Labelled values.
        y_ticks: Labelled counts.
        summary: The chart in words.
    """

    title: str
    unit: str
    bars: tuple[Bar, ...]
    mean: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    summary: str


def line_chart(
    title: str, unit: str, curves: Mapping[str, Curve], *, logarithmic: bool = False, from_zero: bool = False
) -> LineChart | None:
    """Lays out curves.

    Args:
        title: What they show.
        unit: Unit of their values, or an empty string.
        curves: Curves by name, of which the first ``MOST_SERIES`` with a value that can be drawn are.
        logarithmic: Draw the logarithm of values; those that have none are left out.
        from_zero: Whether the axis of values begins at 0, for amounts.

    Returns:
        The chart, or None if there is nothing to draw.
    """
    drawable: dict[str, Curve] = {}
    for name, curve in curves.items():
        points = tuple(
            (step, value) for step, value in curve if math.isfinite(value) and (value > 0 or not logarithmic)
        )
        if points and len(drawable) < MOST_SERIES:
            drawable[name] = points
    if not drawable:
        return None
    values = [value for curve in drawable.values() for _, value in curve]
    last_step = max(curve[-1][0] for curve in drawable.values())
    steps = ticks(0, max(last_step, 1), 5)
    lowest, highest = 0.0 if from_zero else min(values), max(values)
    levels = decades(lowest, highest) if logarithmic else ticks(lowest, highest, 5, around=True)
    x = _scale(0, max(last_step, 1), LEFT, WIDTH - RIGHT)
    y = _scale(levels[0], levels[-1], HEIGHT - BOTTOM, TOP, logarithmic)
    lines = tuple(_line(name, unit, curve, x, y) for name, curve in drawable.items())
    summary = "; ".join(f"{line.label} ends at {line.last}" for line in lines)
    return LineChart(
        title,
        unit,
        lines,
        tuple(Tick(x(step), short(step)) for step in steps if step <= last_step),
        tuple(Tick(y(level), short(level)) for level in levels),
        f"{title} over {last_step} steps: {summary}.",
    )


def histogram(title: str, unit: str, values: Sequence[float]) -> Histogram:
    """Counts values in ranges whose ends are round numbers.

    Args:
        title: What it shows.
        unit: Unit of the values.
        values: At least one, all finite.
    """
    edges = ticks(min(values), max(values), 14, around=True)
    width = edges[1] - edges[0]
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[min(int((value - edges[0]) / width), len(counts) - 1)] += 1
    x = _scale(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    heights = [level for level in ticks(0, max(counts), 5) if level == int(level)]
    y = _scale(0, max(*counts, *heights), HEIGHT - BOTTOM, TOP)
    bars = tuple(
        Bar(
            x(low) + 0.75,
            y(count),
            x(low + width) - x(low) - 1.5,
            y(0) - y(count),
            f"{short(low)} to {short(low + width)} {unit}: {count} of {len(values)} views",
        )
        for low, count in zip(edges, counts, strict=False)
        if count
    )
    mean = math.fsum(values) / len(values)
    every = max(1, math.ceil(len(edges) / 7))
    return Histogram(
        title,
        unit,
        bars,
        x(mean),
        tuple(Tick(x(edge), short(edge)) for edge in edges[::every]),
        tuple(Tick(y(level), short(level)) for level in heights),
        f"{title}: {len(values)} views from {min(values):.2f} to {max(values):.2f} {unit}, mean {mean:.2f} {unit}.",
    )


def ticks(low: float, high: float, count: int, *, around: bool = False) -> list[float]:
    """Returns round numbers at equal distances, 1, 2 or 5 times a power of ten.

    Args:
        low: Lower end of the range.
        high: Upper end of the range, not below ``low``.
        count: About how many of them to return.
        around: Whether the first and the last lie at or beyond the range's ends, rather than within it.
    """
    if high <= low:
        margin = abs(low) * 0.05 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = low / step, high / step
    whole = range(math.floor(first), math.ceil(last) + 1) if around else range(math.ceil(first), math.floor(last) + 1)
    numbers = [index * step for index in whole]
    # A single value on an end of a range of its own is in the range before.
    return numbers if len(numbers) > 1 or not around else [*numbers, numbers[-1] + step]


def decades(low: float, high: float) -> list[float]:
    """Returns the powers of ten around a range of positive numbers, at most six of them.

    Args:
        low: Above 0.
        high: Not below ``low``.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = math.ceil((last - first) / 6)
    return [10.0**exponent for exponent in range(first, last + 1, every)]


def short(value: float) -> str:
    """Writes 3120000 as 3.12M and 0.00002 as 2e-05."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return "0" if abs(value) < 1e-12 else f"{value:.3g}"


def thinned(curve: Curve, max_points: int = _MAX_POINTS) -> Curve:
    """Returns a curve of at most about a number of points, which keeps every peak and every dip.

    Args:
        curve: Any curve.
        max_points: About how many points to keep at most.
    """
    if len(curve) <= max_points:
        return curve
    size = math.ceil(2 * len(curve) / max_points)
    kept = []
    for first in range(0, len(curve), size):
        bucket = curve[first : first + size]
        ends = {bucket.index(min(bucket, key=_value)), bucket.index(max(bucket, key=_value))}
        kept += [bucket[index] for index in sorted(ends)]
    return tuple(kept if kept[-1] == curve[-1] else [*kept, curve[-1]])


def _value(point: tuple[int, float]) -> float:
    return point[1]


def _line(name: str, unit: str, curve: Curve, x: _Scale, y: _Scale) -> Line:
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in thinned(curve))
    every = math.ceil(len(curve) / _MAX_MARKS)
    marked = curve[::-every][::-1]
    marks = tuple(Mark(x(step), y(value), f"{name}, step {step}: {value:.4g} {unit}".strip()) for step, value in marked)
    return Line(name, points, marks, f"{short(curve[-1][1])} {unit}".strip())


@dataclass(frozen=True)
class _Scale:
    """Maps values to places, linearly or by their logarithm."""

    low: float
    high: float
    first: float
    last: float
    logarithmic: bool

    def __call__(self, value: float) -> float:
        low, high, value = (
            math.log10(number) if self.logarithmic else number for number in (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return self.first + share * (self.last - self.first)


def _scale(low: float, high: float, first: float, last: float, logarithmic: bool = False) -> _Scale:
    return _Scale(low, high, first, last, logarithmic)
