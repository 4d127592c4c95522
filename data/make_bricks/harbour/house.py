"""The keeper's house."""

from __future__ import annotations

import numpy as np

from make_bricks.geometry.dimensions import BRICK
from make_bricks.geometry.masonry import SLIM, block, masonry
from make_bricks.geometry.model import Model
from make_bricks.harbour.openings import build_door, build_window
from make_bricks.harbour.terrain import GROUND
from make_bricks.pictures import clock_picture, mural_picture


def build_house(model: Model, rng: np.random.Generator) -> None:
    """Adds the house: brick walls, windows, a mural, a shingled roof, a chimney and an aerial."""
    palette = ("cream", "cream", "cream", "sand", "orange")
    walls = block(1, 7, 3, 7) - block(2, 6, 4, 6)
    door, panes = {(2, 3)}, {(4, 3), (5, 3), (2, 6), (4, 6), (5, 6), (1, 4), (1, 5)}
    for course in range(3):
        openings = (door if course < 2 else set()) | (panes if course else set())
        masonry(model, walls - openings, GROUND + course * BRICK, BRICK, palette, rng, SLIM)
    sill = GROUND + BRICK + 0.15
    with model.placed(2.5, 3.25, GROUND):
        build_door(model, 0.8, 2.2, "teal")
    for x, y, yaw, width in ((5, 3.22, 0, 1.75), (5, 6.78, 180, 1.75), (2.5, 6.78, 180, 0.75), (1.22, 5, 270, 1.75)):
        with model.placed(x, y, sill, yaw):
            build_window(model, width, 2.1)
    with model.placed(7.02, 5, GROUND + 0.2, 90):
        model.panel(mural_picture(), 3.4, 3.4)
    build_roof(model, GROUND + 3 * BRICK, rng)
    with model.placed(2, 6, GROUND + 3 * BRICK):
        for k in range(4):
            model.brick("rock_dark" if k % 2 else "red_dark", -1, -1, 0.5 + 0.8 * k, (1, 1), 0.8, studs=False)
        model.box("white", (-1.1, -1.1, 3.7), (0.1, 0.1, 3.9))
        with model.placed(-0.5, -0.5):
            model.cylinder("black", 3.9, 4.3, 0.28, 16)


def build_roof(model: Model, z: float, rng: np.random.Generator) -> None:
    """Adds the roof: a gabled attic, three rows of shingles on either side, a ridge, a clock and an aerial."""
    gable = np.array([(3, z), (7, z), (7, z + 0.3), (5, z + 2.1), (3, z + 0.3)])
    model.solid("white", [np.insert(gable, 0, x, axis=1) for x in (1.0, 7.0)])
    with model.placed(7.02, 5, z + 0.2, 90):
        model.panel(clock_picture(), 1.2, 1.2)
    run, rise = 2.6 / 3, 0.72
    for yaw in (0, 180):
        with model.placed(4, 5, z - 0.05, yaw):
            for row in range(3):
                y, low = -2.6 + row * run, row * rise
                profile = np.array(
                    [(y, low), (y + run + 0.1, low + rise), (y + run + 0.1, low + rise + 0.15), (y, low + 0.3)]
                )
                for k in range(11):
                    left = -3.6 + 0.65 * k + 0.05 + (0.32 if row % 2 else 0.0)
                    right = min(left + 0.58, 3.6)
                    rings = [np.insert(profile, 0, x, axis=1) for x in (left, right)]
                    model.solid(str(rng.choice(("red_dark", "red", "red", "orange"))), rings)
    for k in range(9):
        x = 0.4 + 0.8 * k
        model.strut("red_dark", (x + 0.03, 5, z + 2.2), (x + 0.77, 5, z + 2.2), 0.26, 12)
    model.strut("black", (6.2, 5, z + 2.2), (6.2, 5, z + 5.2), 0.07)
    for k in range(5):
        reach = 0.9 - 0.14 * k
        model.strut("black", (6.2 - reach, 5, z + 3.3 + 0.42 * k), (6.2 + reach, 5, z + 3.3 + 0.42 * k), 0.05)
