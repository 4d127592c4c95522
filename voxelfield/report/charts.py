"""Charts of a report as SVG that matplotlib draws, in the colours of the page's style sheet."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from voxelfield.report.history import Curve

if TYPE_CHECKING:
    from markupsafe import Markup

MOST_SERIES = 8
"""Number of line colours, and thus of curves per chart."""

WIDTH, HEIGHT = 400, 230
"""Size of every chart, in points."""

# Stand for colours of the style sheet, which follow the reader's light or dark mode: --s0 to --s7, --grid and --line.
_SERIES = [f"#00000{index + 1}" for index in range(MOST_SERIES)]
_GRID, _LINE = "#00000a", "#00000b"
_VARIABLES = {_GRID: "--grid", _LINE: "--line"} | {color: f"--s{index}" for index, color in enumerate(_SERIES)}

# Parts of matplotlib's SVG that are left out: ids, which all charts share, references to them, style sheets, fonts.
_REMOVED = re.compile(
    r' (id|clip-path|xmlns:xlink)="[^"]*"| font-family: [^;"]*;|<defs>.*?</defs>|<!--.*?-->', re.DOTALL
)


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        title: Title.
        unit: Unit of the values, or an empty string.
        svg: The drawing as an element of the page.
        legend: Name and last value, in words, of each curve, in the order of the style sheet's colours.
        summary: The chart in words, for screen readers.
    """

    title: str
    unit: str
    svg: Markup
    legend: tuple[tuple[str, str], ...]
    summary: str


def line_chart(
    title: str, unit: str, curves: Mapping[str, Curve], *, logarithmic: bool = False, from_zero: bool = False
) -> Chart | None:
    """Draws curves over steps.

    Args:
        title: Title.
        unit: Unit of their values, or an empty string.
        curves: Curves by name; at most ``MOST_SERIES`` are drawn.
        logarithmic: Draw the logarithm of values; values that are not positive are left out.
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
    last_step = max(curve[-1][0] for curve in drawable.values())
    legend = tuple((name, f"{short(curve[-1][1])} {unit}".strip()) for name, curve in drawable.items())
    summary = f"{title} over {last_step} steps: {'; '.join(f'{name} ends at {last}' for name, last in legend)}."

    def draw(axes: Any) -> None:
        axes.set_yscale("log" if logarithmic else "linear")
        for color, curve in zip(_SERIES, drawable.values(), strict=False):
            axes.plot(*zip(*curve, strict=True), color=color, linewidth=2, clip_on=False)
        axes.set(xlim=(0, max(last_step, 1)), ylim=(0 if from_zero else None, None))
        axes.set_xlabel("steps", loc="right")

    return Chart(title, unit, _svg(draw, summary), legend, summary)


def short(value: float) -> str:
    """Writes 3120000 as 3.12M and 0.00002 as 2e-05."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return "0" if abs(value) < 1e-12 else f"{value:.3g}"


def _svg(draw: Callable[[Any], None], summary: str) -> Markup:
    """Draws a chart, whose limits become round numbers."""
    # Imported here, because it takes long and few programs write reports.
    from markupsafe import Markup, escape
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    settings: Any = {"axes.autolimit_mode": "round_numbers", "axes.xmargin": 0, "axes.ymargin": 0}
    settings |= {"font.size": 11.5, "svg.fonttype": "none"}
    with rc_context(settings):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        axes = figure.add_axes((0.13, 0.17, 0.84, 0.77), axisbelow=True)
        draw(axes)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: short(value))
            axis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="both", length=0, pad=6)
        axes.grid(axis="y", color=_GRID)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(_LINE)
        axes.patch.set_visible(False)
        figure.patch.set_visible(False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = _REMOVED.sub("", file.getvalue().partition("<svg")[2])
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return Markup(f'<svg role="img" aria-label="{escape(summary)}"{svg}')
