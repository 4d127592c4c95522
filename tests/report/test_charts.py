from __future__ import annotations

import math
import re

import pytest

from voxelfield.report.page import COLORS, line_chart, short

WIDTH, HEIGHT = 400, 230


def drawn(chart) -> list[list[tuple[float, float]]]:
    """Returns the ends of the lines of each curve, in points from the upper left corner."""
    paths = (re.findall(rf'<path d="([^"]*)"[^>]*stroke: {color}', chart.svg.decode()) for color in COLORS)
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)] for (path,) in filter(None, paths)]


def labels(chart) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", chart.svg.decode())


def test_a_curve_is_drawn_where_its_values_are():
    curve = ((0, 10.0), (50, 20.0), (100, 30.0))
    chart = line_chart("PSNR", "dB", {"train": curve, "none": ()})
    assert chart.legend == (("train", "30 dB"),)
    ((first, middle, last),) = drawn(chart)
    assert first[0] < middle[0] < last[0]
    assert first[1] > middle[1] > last[1], "y counts downwards"
    assert middle == pytest.approx(((first[0] + last[0]) / 2, (first[1] + last[1]) / 2), abs=0.1)
    assert {"0", "100", "10", "30", "steps"} <= set(labels(chart))
    assert chart.summary == "PSNR over 100 steps: train ends at 30 dB."
    assert chart.svg == line_chart("PSNR", "dB", {"train": curve}).svg, "no dates or chance"


def test_a_logarithmic_chart_places_decades_evenly_and_leaves_out_what_has_no_logarithm():
    curve = ((1, 1e-1), (2, 0.0), (3, 1e-2), (4, math.nan), (5, 1e-3))
    chart = line_chart("loss", "", {"rgb": curve}, logarithmic=True)
    ((first, middle, last),) = drawn(chart)
    assert middle[1] - first[1] == pytest.approx(last[1] - middle[1], abs=0.2)
    assert {"0.1", "0.01", "0.001"} <= set(labels(chart))
    assert line_chart("loss", "", {"rgb": ((1, 0.0), (2, -1.0))}, logarithmic=True) is None
    assert {"0.001", "0.01"} <= set(labels(line_chart("loss", "", {"rgb": ((1, 0.002), (2, 0.003))}, logarithmic=True)))


def test_amounts_are_drawn_from_zero():
    chart = line_chart("rays", "", {"rays": ((0, 90.0), (10, 100.0))}, from_zero=True)
    ((first, last),) = drawn(chart)
    bottom = 0.83 * HEIGHT
    assert (bottom - first[1]) / (bottom - last[1]) == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-9, 5e7])
def test_a_curve_of_one_value_has_a_chart(value):
    chart = line_chart("one", "", {"one": ((7, value), (14, value))})
    for x, y in drawn(chart)[0]:
        assert 0 < x < WIDTH
        assert 0 < y < HEIGHT


def test_a_single_value_is_drawn_as_a_dot():
    """Such as the views of a run that is shorter than the interval between previews."""
    chart = line_chart("PSNR", "dB", {"train": ((20, 20.0), (40, 25.0)), "test": ((40, 24.0),)})
    (_, (right, top)), _ = drawn(chart)
    ((x, y, color),) = re.findall(r'<use [^>]*x="(\S+)" y="(\S+)" style="fill: (#\w+)', chart.svg.decode())
    assert color == COLORS[1]
    assert float(x) == pytest.approx(right)
    assert top < float(y) < HEIGHT


def test_nothing_to_draw_is_no_chart():
    assert line_chart("empty", "", {}) is None
    assert line_chart("nan", "", {"nan": ((1, math.nan), (2, math.inf))}) is None


def test_no_more_curves_are_drawn_than_there_are_colours():
    curves = {str(index): ((0, index), (10, index + 1)) for index in range(len(COLORS) + 2)}
    chart = line_chart("many", "", curves)
    assert len(drawn(chart)) == len(chart.legend) == len(COLORS)
    assert "fill: #ffffff" not in chart.svg.decode(), "the page's background shows through"


def test_numbers_are_short():
    shown = [short(value) for value in (0.0, 3.12e6, 2100, 31.25, 2e-5, -1500)]
    assert shown == ["0", "3.12M", "2.1k", "31.2", "2e-05", "-1.5k"]
