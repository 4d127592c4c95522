"""Plots of benchmark results with matplotlib, as SVG with colours that suit light and dark pages."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

# Inches; at 100 dpi, multiples of 100 pixels in the file.
PANEL_WIDTH, PANEL_HEIGHT, LEGEND_HEIGHT = 3.0, 2.3, 0.4
# Mid-tones of similar contrast against white and near-black.
INK = "#7d8590"
BLUE, ORANGE = "#3b82f6", "#e0701a"

STYLE: dict[Any, Any] = {
    # Text stays text, so that it can be searched and copied; ids are reproducible.
    "svg.fonttype": "none",
    "svg.hashsalt": "voxelfield",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.alpha": 0.35,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}


@dataclass(frozen=True)
class Series:
    """One line: its name in the legend, its colour, whether it is dashed, and its (x, y) points."""

    name: str
    color: str
    dashed: bool
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One pair of axes; ``ticks`` are increasing positions and labels along x, those along y are automatic."""

    title: str
    x_label: str
    y_label: str
    ticks: Sequence[tuple[float, str]]
    series: Sequence[Series]
    linear: bool = False


def figure(rows: Sequence[Sequence[Panel]]) -> str:
    """Draws rows of panels under one legend; the panels of a row share their y axis.

    Args:
        rows: Panels from left to right, rows from top to bottom.

    Returns:
        The text of an SVG file.
    """
    columns = max(len(row) for row in rows)
    size = (PANEL_WIDTH * columns, PANEL_HEIGHT * len(rows) + LEGEND_HEIGHT)
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=size, layout="constrained")
        axes = drawn.subplots(len(rows), columns, sharey="row", squeeze=False)
        lines: dict[str, Line2D] = {}
        for row, row_axes in zip(rows, axes, strict=True):
            for place, panel_axes in enumerate(row_axes):
                if place < len(row):
                    lines.update(_draw(panel_axes, row[place]))
                else:
                    panel_axes.set_visible(False)
        drawn.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=len(lines), frameon=False)
        text = io.StringIO()
        drawn.savefig(text, format="svg", transparent=True, dpi=100, metadata={"Date": None})
    return text.getvalue()


def _draw(axes: Axes, panel: Panel) -> dict[str, Line2D]:
    """Draws one panel; returns its lines by name."""
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_xscale("log")
    axes.set_xticks([place for place, _ in panel.ticks], [label for _, label in panel.ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    if not panel.linear:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelleft=True)
    lines = {}
    for series in panel.series:
        x, y = [point[0] for point in series.points], [point[1] for point in series.points]
        style = "--" if series.dashed else "-"
        (line,) = axes.plot(x, y, style, color=series.color, marker="o", markersize=3, linewidth=1.4)
        line.set_gid(f"line {series.name}: {panel.title}")
        lines[series.name] = line
    return lines
