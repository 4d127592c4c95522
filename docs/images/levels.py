"""Draws levels.svg, levels of a pyramid, a sparse level and nested boxes: run it to draw it again."""

from __future__ import annotations

import math
from pathlib import Path

from svg import BLUE, INK, ORANGE, Point, curve, drawing, rectangle, text

SIDE = 150
TOP = 46
LEFTS = (20, 200, 380, 610)
BLOCK = 4
"""Voxels along a block of the sparse level in the drawing; the library uses 8."""
THIN = f'fill="none" stroke="{INK}" stroke-opacity="0.45" stroke-width="0.8"'


def outline(angle: float) -> Point:
    """Returns a point on the outline of the subject, in units of a panel."""
    radius = 0.27 + 0.06 * math.sin(3 * angle) + 0.03 * math.cos(5 * angle)
    return 0.5 + radius * math.cos(angle), 0.5 + radius * math.sin(angle)


ANGLES = [2 * math.pi * step / 360 for step in range(361)]


def subject(left: float) -> str:
    """Draws the subject's outline in a panel."""
    points = [(left + SIDE * x, TOP + SIDE * y) for x, y in map(outline, ANGLES)]
    return curve(points, f'stroke="{ORANGE}" stroke-width="2"')


def lattice(corner: Point, side: float, count: int, hole: bool = False) -> str:
    """Draws count x count squares; those of the middle half are left out if there is a hole."""
    x, y = corner
    step, quarter = side / count, side / 4
    pieces = []
    for index in range(count + 1):
        at, inside = index * step, hole and count // 4 < index < count - count // 4
        for start, end in ((0.0, quarter), (3 * quarter, side)) if inside else ((0.0, side),):
            pieces.append(f"M{x + at:.4g} {y + start:.4g}V{y + end:.4g}M{x + start:.4g} {y + at:.4g}H{x + end:.4g}")
    return f'<path d="{"".join(pieces)}" {THIN}/>'


def sparse(left: float, count: int) -> list[str]:
    """Draws blocks that the outline passes through, each with its voxels."""
    blocks = count // BLOCK
    size = SIDE / blocks
    style = f'fill="{BLUE}" fill-opacity="0.16" stroke="{BLUE}" stroke-width="1.2"'
    parts = [rectangle((left, TOP), (SIDE, SIDE), THIN)]
    for i, j in sorted({(int(x * blocks), int(y * blocks)) for x, y in map(outline, ANGLES)}):
        corner = (left + i * size, TOP + j * size)
        parts += [rectangle(corner, (size, size), style), lattice(corner, size, BLOCK)]
    return parts


def nested(left: float, boxes: int, count: int) -> list[str]:
    """Draws boxes around one another, each twice as large as the one in it, with as many voxels."""
    parts = []
    for box in range(boxes):
        side = SIDE / 2**box
        corner = (left + (SIDE - side) / 2, TOP + (SIDE - side) / 2)
        parts.append(lattice(corner, side, count, hole=box < boxes - 1))
        parts.append(rectangle(corner, (side, side), f'fill="none" stroke="{BLUE}" stroke-width="1.6"'))
    return parts


def figure() -> str:
    """Returns the text of the SVG file."""
    below = TOP + SIDE
    names = ("a coarse level", "a fine level", "a sparse level", "nested boxes")
    what = ("all voxels", "all voxels", "blocks where there is something", "each twice as large")
    parts = [
        lattice((LEFTS[0], TOP), SIDE, 6),
        lattice((LEFTS[1], TOP), SIDE, 24),
        *sparse(LEFTS[2], 48),
        *nested(LEFTS[3], 3, 8),
        *(subject(left) for left in LEFTS[:3]),
    ]
    for left, name, note in zip(LEFTS, names, what, strict=True):
        parts.append(text((left + SIDE / 2, below + 26), name))
        parts.append(text((left + SIDE / 2, below + 46), note, 'font-size="12"'))
    parts.append(text(((LEFTS[0] + LEFTS[2] + SIDE) / 2, 26), "levels of a pyramid over one box", 'font-size="14"'))
    parts.append(text((LEFTS[3] + SIDE / 2, 26), "for unbounded scenes", 'font-size="14"'))
    label = "A coarse, a fine and a sparse level over one subject, and three nested boxes with as many voxels each"
    return drawing((800, 260), label, parts)


if __name__ == "__main__":
    Path(__file__).with_name("levels.svg").write_text(figure())
