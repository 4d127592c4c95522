"""Charts of a report, which matplotlib draws."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from voxelfield.report.record import Curve

# Legible on white and on black, because the page follows the reader's light or dark mode.
COLORS = ("#2f7fd6", "#e0602a", "#1f9d70", "#a550c0", "#b08510", "#d0416f", "#3a97a6", "#808894")
"""Colours of the curves of a chart, in their order, which limit their number."""

_GREY = "#8a919a"
_SIZE = (400, 230)  # points


@dataclass(frozen=True)
class Chart:
    """A chart: an SVG file, the unit of its values, and a summary in words for screen readers.

    The legend has the name and the last value of each curve, in words, in the order of :data:`COLORS`.
    """

    title: str
    unit: str
    svg: bytes
    legend: tuple[tuple[str, str], ...]
    summary: str


def line_chart(
    title: str, unit: str, curves: Mapping[str, Curve], *, logarithmic: bool = False, from_zero: bool = False
) -> Chart | None:
    """Draws curves over steps, as many as there are :data:`COLORS`; returns None if there is nothing to draw.

    A logarithmic axis leaves out values that are not positive. ``from_zero`` suits amounts.
    """
    drawable: dict[str, Curve] = {}
    for name, curve in curves.items():
        points = tuple(
            (step, value) for step, value in curve if math.isfinite(value) and (value > 0 or not logarithmic)
        )
        if points and len(drawable) < len(COLORS):
            drawable[name] = points
    if not drawable:
        return None
    # Imported here, because it takes long and few programs write reports.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    settings: Any = {"axes.autolimit_mode": "round_numbers", "axes.xmargin": 0, "axes.ymargin": 0}
    settings |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _GREY)
    settings |= {"font.size": 11.5, "svg.fonttype": "none", "svg.hashsalt": title}
    file, last_step = io.BytesIO(), max(curve[-1][0] for curve in drawable.values())
    with rc_context(settings):
        figure = Figure(figsize=(_SIZE[0] / 72, _SIZE[1] / 72))
        axes = figure.add_axes((0.13, 0.17, 0.84, 0.77), axisbelow=True)
        axes.set_yscale("log" if logarithmic else "linear")
        for color, curve in zip(COLORS, drawable.values(), strict=False):
            axes.plot(*zip(*curve, strict=True), color=color, linewidth=2, clip_on=False)
        axes.set(xlim=(0, max(last_step, 1)), ylim=(0 if from_zero else None, None))
        axes.set_xlabel("steps", loc="right")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: short(value))
            axis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="both", length=0, pad=6)
        axes.grid(axis="y", color=_GREY, alpha=0.25)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(_GREY)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    legend = tuple((name, f"{short(curve[-1][1])} {unit}".strip()) for name, curve in drawable.items())
    summary = f"{title} over {last_step} steps: {'; '.join(f'{name} ends at {last}' for name, last in legend)}."
    return Chart(title, unit, file.getvalue(), legend, summary)


def short(value: float) -> str:
    """Writes 3120000 as 3.12M and 0.00002 as 2e-05."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return "0" if abs(value) < 1e-12 else f"{value:.3g}"
