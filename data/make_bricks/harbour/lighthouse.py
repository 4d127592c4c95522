"""The lighthouse."""

from __future__ import annotations

import numpy as np

from make_bricks.arrays import Array
from make_bricks.geometry.dimensions import BEVEL, BRICK, PLATE
from make_bricks.geometry.frameworks import railing
from make_bricks.geometry.masonry import block, masonry
from make_bricks.geometry.model import Model
from make_bricks.geometry.outlines import circle, wedge
from make_bricks.geometry.rings import level, upright
from make_bricks.harbour.openings import build_door, build_window
from make_bricks.harbour.terrain import GROUND

POSITION = (-3.0, 4.0)
TOWER_RADII = (2.35, 2.25, 2.15, 2.05, 1.95, 1.85, 1.75)  # one for each course, from the bottom up


def build_lighthouse(model: Model, rng: np.random.Generator) -> None:
    """Adds the plinth, the banded tower, its gallery, the lamp and the flag."""
    masonry(model, block(-6, 0, 1, 7), GROUND, BRICK, ("rock_dark", "rock", "rock_dark"), rng)
    base = GROUND + BRICK
    with model.placed(*POSITION):
        for course, radius in enumerate(TOWER_RADII):
            build_tower_course(model, base + course * BRICK, radius, course)
        with model.placed(0, -2.3, base):
            build_door(model, 1.0, 1.9, "teal")
        for course, yaw in ((2, 0), (3, 90), (4, 180), (5, 270), (3, 210), (5, 45)):
            turn = np.radians(yaw - 90)
            reach = TOWER_RADII[course] + 0.03
            with model.placed(reach * np.cos(turn), reach * np.sin(turn), base + course * BRICK + 0.15, yaw):
                build_window(model, 0.6, 0.95)
        build_lantern(model, base + len(TOWER_RADII) * BRICK)


def build_tower_course(model: Model, z: float, radius: float, course: int) -> None:
    """Adds one round course of the tower: ten bricks, offset by half a brick from the course below."""
    model.cylinder("black", z, z + BRICK, radius - 0.2, 48)
    step = 2 * np.pi / 10
    for k in range(10):
        start = (k + 0.5 * (course % 2)) * step

        def outline(inset: float, start: float = start) -> Array:
            return wedge(0.6 * radius, radius - inset, start, start + step, 0.03)

        model.solid("white" if course % 2 else "red", upright(outline, z + 0.02, z + BRICK - 0.02, BEVEL))


def build_lantern(model: Model, z: float) -> None:
    """Adds the top of the tower: a gallery with a railing, a ribbed lamp behind bars, a roof and a chequered flag."""
    model.cylinder("black", z, z + PLATE, 2.5, 48)
    for angle in np.linspace(0, 360, 12, endpoint=False):
        with model.placed(0, 0, z, float(angle)):
            model.box("yellow", (1.6, -0.12, -0.35), (2.35, 0.12, 0.02), 0.03)
    railing(model, "white", level(circle(2.35, 16), z + PLATE), 1.0, closed=True)
    z += PLATE
    model.cylinder("white", z, z + PLATE, 1.35, 32)
    for k in range(6):
        model.cylinder("orange" if k % 2 else "yellow", z + 0.4 + 0.3 * k, z + 0.7 + 0.3 * k, 0.85 - 0.15 * (k % 2), 24)
    posts, middle = level(circle(1.2, 8), z + PLATE), np.array([0, 0, 0.9])
    for post, after in zip(posts, np.roll(posts, -1, axis=0), strict=True):
        model.strut("black", post, post + 2 * middle, 0.08)
        model.strut("black", post + middle, after + middle, 0.05)
    z += PLATE + 1.8
    model.cylinder("white", z, z + 0.25, 1.6, 32)
    for k in range(4):
        model.cone(
            "teal" if k % 2 else "red", z + 0.25 + 0.32 * k, z + 0.57 + 0.32 * k, 1.45 - 0.3 * k, 1.2 - 0.3 * k, 32
        )
    z += 0.25 + 4 * 0.32
    model.cylinder("yellow", z, z + 0.3, 0.25, 16)
    model.strut("white", (0, 0, z), (0, 0, z + 2.4), 0.08)
    for k in range(8):
        for row in range(4):
            sway = 0.12 * np.sin(np.pi * k / 4) - 0.06
            corner = (0.08 + 0.22 * k, sway - 0.04, z + 1.4 + 0.22 * row)
            far = (corner[0] + 0.22, sway + 0.04, corner[2] + 0.22)
            model.box("black" if (k + row) % 2 else "white", corner, far, 0.005)
