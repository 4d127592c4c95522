from __future__ import annotations

import math

import pytest

from voxelfield.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    decades,
    histogram,
    line_chart,
    short,
    thinned,
    ticks,
)


def points(line) -> list[tuple[float, float]]:
    return [tuple(map(float, point.split(","))) for point in line.points.split()]


def test_a_curve_is_drawn_where_its_values_are():
    chart = line_chart("PSNR", "dB", {"train": ((0, 10.0), (50, 20.0), (100, 30.0)), "none": ()})
    (line,) = chart.lines
    assert line.label == "train"
    assert line.last == "30 dB"
    drawn = points(line)
    assert drawn[0] == (LEFT, HEIGHT - BOTTOM)
    assert drawn[-1] == (WIDTH - RIGHT, TOP)
    assert drawn[1] == pytest.approx(((LEFT + WIDTH - RIGHT) / 2, (HEIGHT - BOTTOM + TOP) / 2), abs=0.1)
    assert [tick.label for tick in chart.y_ticks] == ["10", "15", "20", "25", "30"]
    assert [tick.label for tick in chart.x_ticks] == ["0", "20", "40", "60", "80", "100"]
    assert chart.summary == "PSNR over 100 steps: train ends at 30 dB."
    assert [mark.text for mark in line.marks][-1] == "train, step 100: 30 dB"


def test_a_logarithmic_chart_places_decades_evenly_and_leaves_out_what_has_no_logarithm():
    curve = ((1, 1e-1), (2, 0.0), (3, 1e-2), (4, math.nan), (5, 1e-3))
    chart = line_chart("loss", "", {"rgb": curve}, logarithmic=True)
    heights = [y for _, y in points(chart.lines[0])]
    assert len(heights) == 3
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.2)
    assert line_chart("loss", "", {"rgb": ((1, 0.0), (2, -1.0))}, logarithmic=True) is None


def test_amounts_are_drawn_from_zero():
    chart = line_chart("rays", "", {"rays": ((0, 90.0), (10, 100.0))}, from_zero=True)
    assert chart.y_ticks[0].label == "0"
    assert chart.y_ticks[0].place == HEIGHT - BOTTOM


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-9, 5e7])
def test_a_curve_of_one_value_is_in_the_middle_of_its_axis(value):
    chart = line_chart("one", "", {"one": ((7, value),)})
    ((x, y),) = points(chart.lines[0])
    assert x == WIDTH - RIGHT
    assert TOP <= y <= HEIGHT - BOTTOM


def test_nothing_to_draw_is_no_chart():
    assert line_chart("empty", "", {}) is None
    assert line_chart("nan", "", {"nan": ((1, math.nan), (2, math.inf))}) is None


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (19.61, 23.85), (-7.0, 3.0), (1e-9, 3e-9), (0.0, 1e12), (5.0, 5.0)]
)
def test_ticks_are_few_round_and_within_or_around(low, high):
    within, around = ticks(low, high, 5), ticks(low, high, 5, around=True)
    assert 2 <= len(within) <= 7
    for numbers in (within, around):
        step = numbers[1] - numbers[0]
        assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 5)
    if high > low:
        assert all(low - 1e-9 * abs(low) <= number <= high * (1 + 1e-9) for number in within)
    assert around[0] <= low
    assert around[-1] >= high


def test_decades_are_whole_and_few():
    assert decades(0.002, 0.3) == pytest.approx([1e-3, 1e-2, 1e-1, 1])
    assert decades(1.0, 1.0) == pytest.approx([1, 10])
    assert len(decades(1e-30, 1e30)) <= 8
    assert decades(1e-30, 1e30)[-1] >= 1e30


def test_every_value_is_counted_once():
    values = [19.61, 20.0, 20.49, 20.5, 22.0, 22.1, 22.2, 23.85]
    chart = histogram("PSNR", "dB", values)
    counts = [int(bar.text.split(": ")[1].split()[0]) for bar in chart.bars]
    assert sum(counts) == len(values)
    assert all(bar.height > 0 and bar.width > 0 for bar in chart.bars)
    assert chart.summary.startswith("PSNR: 8 views from 19.61 to 23.85 dB")
    same = histogram("PSNR", "dB", [30.0, 30.0])
    assert [bar.text.split(": ")[1] for bar in same.bars] == ["2 of 2 views"]
    assert LEFT <= same.mean <= WIDTH - RIGHT


def test_thinning_keeps_ends_and_peaks():
    curve = tuple((step, 1000.0 if step == 777 else math.sin(step)) for step in range(5000))
    kept = thinned(curve, 300)
    assert len(kept) <= 303
    assert (777, 1000.0) in kept
    assert kept[-1] == curve[-1]
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert thinned(curve[:10], 300) == curve[:10]


def test_numbers_are_short():
    assert [short(value) for value in (0.0, 3.12e6, 2100, 31.25, 2e-5, -1500)] == [
        "0",
        "3.12M",
        "2.1k",
        "31.2",
        "2e-05",
        "-1.5k",
    ]
