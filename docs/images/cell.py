"""Draws cell.svg, a grid cell with its numbered corners and the weight of one of them: run it to draw it again."""

from __future__ import annotations

import itertools
from pathlib import Path

from svg import BLUE, INK, ORANGE, drawing, line, sub, text

# Screen positions of the cell's lower corner and of its x, y, z edges; the viewer sees the faces x = 1, y = 0, z = 1.
ORIGIN = (150, 304)
EDGES = ((230, 42), (112, -78), (0, -205))
HIDDEN = 2
POINT = (0.58, 0.6, 0.52)
CORNERS = tuple(itertools.product((0, 1), repeat=3))


def place(position: tuple[float, ...], origin: tuple[float, float] = ORIGIN, scale: float = 1) -> tuple[float, float]:
    """Returns where a position in the cell lies on the screen."""
    x, y = (origin[i] + scale * sum(p * edge[i] for p, edge in zip(position, EDGES, strict=True)) for i in range(2))
    return x, y


def edges() -> list[str]:
    """Draws the twelve edges; those that meet the hidden corner dashed."""
    parts = []
    for a, b in itertools.combinations(range(8), 2):
        if (a ^ b).bit_count() == 1:
            dashes = ' stroke-dasharray="5 4"' if HIDDEN in (a, b) else ""
            parts.append(line(place(CORNERS[a]), place(CORNERS[b]), f'stroke="{INK}" stroke-width="1.6"{dashes}'))
    return parts


def box() -> list[str]:
    """Draws the box between corner 0 and the point."""
    x, y, z = POINT
    faces = (
        ((x, 0, 0), (x, y, 0), (x, y, z), (x, 0, z)),
        ((0, 0, 0), (x, 0, 0), (x, 0, z), (0, 0, z)),
        ((0, 0, z), (x, 0, z), (x, y, z), (0, y, z)),
    )
    style = f'fill="{ORANGE}" fill-opacity="0.22" stroke="{ORANGE}" stroke-width="1.2" stroke-linejoin="round"'
    return [
        f'<polygon points="{" ".join("{:.1f},{:.1f}".format(*place(corner)) for corner in face)}" {style}/>'
        for face in faces
    ]


def fractions() -> list[str]:
    """Names the sides of the box."""
    x, y, z = POINT
    style = f'fill="{ORANGE}" font-style="italic"'
    (ax, ay), (bx, by), (cx, cy) = place((x / 2, 0, 0)), place((x, y / 2, z)), place((0, 0, z / 2))
    return [
        text((ax - 4, ay + 22), sub("f", "x"), style),
        text((bx + 16, by + 12), sub("f", "y"), style),
        text((cx - 16, cy + 4), sub("f", "z"), style),
    ]


def corners() -> list[str]:
    """Draws each corner's number, and i, j, k beside it."""
    parts = []
    for number, corner in enumerate(CORNERS):
        x, y = place(corner)
        color = ORANGE if number == 7 else BLUE
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="12" fill="{color}"/>')
        parts.append(text((x, y + 5), str(number), 'fill="#ffffff" font-weight="700"'))
        side = 36 if corner[0] else -36
        parts.append(text((x + side, y + 4), " ".join(map(str, corner)), 'font-size="12"'))
    return parts


def axes() -> list[str]:
    """Draws the three directions, apart from the cell."""
    origin, parts = (46.0, 372.0), []
    for axis, name in enumerate("xyz"):
        unit = tuple(float(axis == i) for i in range(3))
        parts.append(line(origin, place(unit, origin, 0.22), f'stroke="{INK}" stroke-width="1.6" marker-end="url(#a)"'))
        x, y = place(unit, origin, 0.22)
        parts.append(text((x + (14 if axis < 2 else 0), y + (5 if axis < 2 else -9)), name, 'font-style="italic"'))
    return parts


def notes() -> list[str]:
    """Explains numbers and weights beside the cell."""
    left = 'style="text-anchor:start"'
    shown = "".join(sub("f", axis) + (" " if axis != "z" else "") for axis in "xyz")
    return [
        text((560, 130), 'corner <tspan font-style="italic">4i + 2j + k</tspan>,', left),
        text((560, 152), 'beside it <tspan font-style="italic">i j k</tspan>', left),
        text((560, 204), f'weight of <tspan fill="{ORANGE}" font-weight="700">corner 7</tspan>:', left),
        text((560, 226), f'<tspan fill="{ORANGE}" font-style="italic">{shown}</tspan>, the volume', left),
        text((560, 248), "of the box opposite to it", left),
    ]


def figure() -> str:
    """Returns the text of the SVG file."""
    x, y = place(POINT)
    point = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{ORANGE}"/>',
        text((x + 2, y - 12), "p", f'fill="{ORANGE}" font-style="italic" font-weight="700" font-size="17"'),
    ]
    label = "A cell, its eight corners numbered 4i + 2j + k, and the box whose volume weighs corner 7"
    return drawing((740, 400), label, [*edges(), *box(), *fractions(), *point, *corners(), *axes(), *notes()])


if __name__ == "__main__":
    Path(__file__).with_name("cell.svg").write_text(figure())
