"""Draws rings.svg, overlap.svg and walking.svg of docs/photographing.md: run it to draw them again."""

from __future__ import annotations

import math
from pathlib import Path

from svg import BLUE, INK, ORANGE, Point, curve, dot, drawing, line, polygon, rectangle, text

OUTLINE = f'fill="none" stroke="{INK}" stroke-width="1.6"'
THIN = f'stroke="{ORANGE}" stroke-width="1.2" stroke-dasharray="5 4"'
LEFT_SIDE = 'style="text-anchor:start"'


def camera(at: Point, towards: Point, color: str = BLUE) -> str:
    """Draws a camera, a dot, and the beginning of what it sees."""
    angle = math.atan2(towards[1] - at[1], towards[0] - at[0])
    ends = [(at[0] + 27 * math.cos(angle + turn), at[1] + 27 * math.sin(angle + turn)) for turn in (-0.5, 0.5)]
    return polygon([at, *ends], f'fill="{color}" fill-opacity="0.3"') + dot(at, 3.5, color)


def in_space(x: float, y: float, z: float) -> Point:
    """Projects a point, z up, as seen obliquely from above."""
    return 300 + x, 262 + 0.42 * y - 0.9 * z


def cube() -> list[str]:
    """Draws the three visible sides of a cube that stands upright."""
    side, height = 46.0, 84.0
    low, high = ([in_space(x, y, z) for x, y in ((0, -side), (side, 0), (0, side), (-side, 0))] for z in (0, height))
    sides = [[low[3], low[2], high[2], high[3]], [low[2], low[1], high[1], high[2]], high]
    style = f'fill="{ORANGE}" fill-opacity="{{}}" stroke="{ORANGE}" stroke-width="1.4"'
    return [polygon(points, style.format(opacity)) for points, opacity in zip(sides, (0.5, 0.35, 0.2), strict=True)]


def rings() -> str:
    """Returns the drawing of an object in the middle of three rings of cameras."""
    behind, before, notes = [], [], []
    middle = in_space(0, 0, 42)
    for elevation, count, words in (
        (8, 20, "level with the object"),
        (36, 16, "from above"),
        (66, 9, "nearly from the top"),
    ):
        radius, height = 225 * math.cos(math.radians(elevation)), 20 + 225 * math.sin(math.radians(elevation))
        for index in range(count):
            turn = 2 * math.pi * (index + 0.5) / count
            at = in_space(radius * math.cos(turn), radius * math.sin(turn), height)
            (before if math.sin(turn) > 0 else behind).append(camera(at, middle))
        round_ = [in_space(radius * math.cos(a / 20), radius * math.sin(a / 20), height) for a in range(127)]
        behind.append(curve(round_, f'stroke="{INK}" stroke-opacity="0.5" stroke-width="1"'))
        notes.append(text((300 + 242, in_space(0, 0, height)[1] + 5), words, LEFT_SIDE))
    label = "An object in the middle of three rings of cameras: level with it, from above, and nearly from the top"
    return drawing((720, 325), label, [*behind, *cube(), *before, *notes])


def overlap() -> str:
    """Returns the drawing of cameras a step apart, so that three of them see each point of a wall."""
    wall, ground, half, step = 50.0, 235.0, 150.0, 100.0
    places = [110 + step * index for index in range(6)]
    parts = [rectangle((20, wall - 14), (680, 14), f'fill="{INK}" fill-opacity="0.35"')]
    point = ((places[2] + places[3]) / 2 - step / 2, wall)
    for x in places:
        seen = [(max(20.0, x - half), wall), (x, ground), (min(700.0, x + half), wall)]
        parts.append(polygon(seen, f'fill="{BLUE}" fill-opacity="0.1" stroke="{BLUE}" stroke-opacity="0.5"'))
    parts += [line((x, ground), point, THIN) for x in places if abs(x - point[0]) < half]
    parts += [dot((x, ground), 3.5, BLUE) for x in places]
    parts += [
        dot(point, 6, ORANGE),
        text((point[0], wall - 24), "seen from three places", f'fill="{ORANGE}"'),
        line((places[0] + 6, ground + 30), (places[1] - 8, ground + 30), f'stroke="{INK}" marker-end="url(#a)"'),
        text((places[1] + 4, ground + 35), "a step to the side: a third of the picture is new", LEFT_SIDE),
    ]
    return drawing((720, 285), "Cameras along a wall, a step apart: each point is seen from three places", parts)


def walking() -> str:
    """Returns the drawing of two ways to photograph a room: from one place, and along its walls."""
    parts = []
    for left in (30.0, 390.0):
        parts.append(rectangle((left, 20), (300, 220), OUTLINE))
        for corner, size in (((left + 115, 60), (70, 36)), ((left + 200, 150), (48, 48)), ((left + 62, 150), (40, 30))):
            parts.append(rectangle(corner, size, f'fill="{INK}" fill-opacity="0.25"'))
    for index in range(10):
        turn = 2 * math.pi * index / 10
        at = (180 + 9 * math.cos(turn), 140 + 9 * math.sin(turn))
        parts.append(camera(at, (180 + 40 * math.cos(turn), 140 + 40 * math.sin(turn)), ORANGE))
    path = [(418, 48), (662, 48), (662, 212), (418, 212), (418, 62)]
    parts.append(curve(path, f'stroke="{INK}" stroke-opacity="0.7" stroke-dasharray="5 4" marker-end="url(#a)"'))
    stops = [(418 + 40.7 * i, 48) for i in range(7)] + [(662, 48 + 41 * i) for i in range(1, 5)]
    stops += [(418 + 40.7 * i, 212) for i in range(6)] + [(418, 48 + 41 * i) for i in range(1, 4)]
    parts += [camera(at, (2 * 540 - at[0], 2 * 130 - at[1])) for at in stops]
    parts += [
        text((180, 266), "turning on the spot shows no depth", f'fill="{ORANGE}"'),
        text((540, 266), "a loop along the walls, looking across", f'fill="{BLUE}"'),
    ]
    label = (
        "Two plans of a room: cameras that turn on the spot, and cameras on a loop along the walls that look across it"
    )
    return drawing((720, 285), label, parts)


if __name__ == "__main__":
    for figure in (rings, overlap, walking):
        Path(__file__).with_name(f"{figure.__name__}.svg").write_text(figure())
