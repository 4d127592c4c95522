"""Draws ray.svg, one ray's samples and what each contributes to its pixel: run it to draw it again."""

from __future__ import annotations

import math
from pathlib import Path

from svg import BLUE, INK, ORANGE, Point, curve, dot, drawing, line, rectangle, sub, text

CELL, COLUMNS, ROWS = 40, 12, 6
GRID: Point = (150, 30)
CAMERA: Point = (52, 236)
TARGET: Point = (640, 72)
STEP = 13.0
"""Distance between samples on the ray, in units of the drawing."""
MIN_TRANSMITTANCE = 0.02
CHART_TOP, CHART_BOTTOM = 318, 418
LEFT_SIDE = 'style="text-anchor:start"'


def density(at: Point) -> float:
    """Returns the density, per unit of the drawing, of a soft ball and a wall behind it."""
    ball = 1 / (1 + math.exp((math.dist(at, (356, 132)) - 46) / 4))
    wall = 1 / (1 + math.exp((560 - at[0]) / 3))
    return 0.016 * ball + 0.2 * wall


def occupied(column: int, row: int) -> bool:
    """Tells whether a cell holds something, as training finds it by looking at several places in the cell."""
    x, y = GRID[0] + column * CELL, GRID[1] + row * CELL
    return any(density((x + i * CELL / 4, y + j * CELL / 4)) > 1e-3 for i in range(5) for j in range(5))


def samples() -> list[tuple[Point, float, float]]:
    """Returns position, transmittance and weight of each sample in occupied cells, until hardly any light is left."""
    length = math.dist(CAMERA, TARGET)
    direction = ((TARGET[0] - CAMERA[0]) / length, (TARGET[1] - CAMERA[1]) / length)
    found, transmittance = [], 1.0
    for index in range(int(length / STEP)):
        at = (CAMERA[0] + (index + 0.5) * STEP * direction[0], CAMERA[1] + (index + 0.5) * STEP * direction[1])
        column, row = math.floor((at[0] - GRID[0]) / CELL), math.floor((at[1] - GRID[1]) / CELL)
        if not (0 <= column < COLUMNS and 0 <= row < ROWS and occupied(column, row)):
            continue
        if transmittance < MIN_TRANSMITTANCE:
            break
        opacity = 1 - math.exp(-density(at) * STEP)
        found.append((at, transmittance, transmittance * opacity))
        transmittance *= 1 - opacity
    return found


def cells() -> list[str]:
    """Draws the grid; occupied cells are filled."""
    parts = []
    for column in range(COLUMNS):
        for row in range(ROWS):
            fill = f'fill="{BLUE}" fill-opacity="0.16"' if occupied(column, row) else 'fill="none"'
            corner = (GRID[0] + column * CELL, GRID[1] + row * CELL)
            parts.append(rectangle(corner, (CELL, CELL), f'{fill} stroke="{INK}" stroke-opacity="0.35"'))
    return parts


def chart(marched: list[tuple[Point, float, float]]) -> list[str]:
    """Draws transmittance and weights below the samples that they belong to."""
    height = CHART_BOTTOM - CHART_TOP
    largest = max(weight for _, _, weight in marched)
    bars = [
        line((x, CHART_BOTTOM), (x, CHART_BOTTOM - height * weight / largest), f'stroke="{ORANGE}" stroke-width="7"')
        for (x, _), _, weight in marched
    ]
    light = [(float(GRID[0]), float(CHART_TOP))]
    light += [(x, CHART_BOTTOM - height * transmittance) for (x, _), transmittance, _ in marched]
    right = GRID[0] + COLUMNS * CELL
    axis = line((GRID[0], CHART_BOTTOM), (right, CHART_BOTTOM), f'stroke="{INK}" stroke-width="1.2"')
    return [
        axis,
        *bars,
        curve(light, f'stroke="{BLUE}" stroke-width="2"'),
        text((GRID[0] + 8, CHART_TOP - 10), f"transmittance {sub('T', 'i')}", f'fill="{BLUE}" {LEFT_SIDE}'),
        text((right + 10, CHART_BOTTOM - 32), f"weight {sub('w', 'i')}", f'fill="{ORANGE}" {LEFT_SIDE}'),
    ]


def figure() -> str:
    """Returns the text of the SVG file."""
    marched = samples()
    ray = line(CAMERA, TARGET, f'stroke="{INK}" stroke-width="1.6" marker-end="url(#a)"')
    points = [dot(at, 4.5, ORANGE if weight > 1e-3 else INK) for at, _, weight in marched]
    x, y = CAMERA
    camera = f'<path d="M{x} {y}L{x - 34} {y - 8}L{x - 18} {y + 30}z" fill="none" stroke="{INK}" stroke-width="1.6"/>'
    right = GRID[0] + COLUMNS * CELL
    notes = [
        text((x - 10, y + 52), "camera"),
        text((right + 10, 130), "occupied cells", f'fill="{BLUE}" {LEFT_SIDE}'),
        text((right + 10, 152), "are sampled,", LEFT_SIDE),
        text((right + 10, 172), "the rest is skipped", LEFT_SIDE),
    ]
    label = "A ray through a grid: samples lie in occupied cells, end where no light is left, and have weights"
    return drawing((800, 440), label, [*cells(), ray, camera, *points, *notes, *chart(marched)])


if __name__ == "__main__":
    Path(__file__).with_name("ray.svg").write_text(figure())
