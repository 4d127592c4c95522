"""The sea and the island, with the heights of its two terraces."""

from __future__ import annotations

import numpy as np

from make_bricks.geometry.dimensions import PLATE, TILE
from make_bricks.geometry.masonry import block, masonry
from make_bricks.geometry.model import Model
from make_bricks.geometry.outlines import star
from make_bricks.geometry.rings import level

QUAY, GROUND = 1.6, 2.8  # heights of the island's two terraces

# The island's first row of studs in each column from x = -8 to 7: a coast with a bay on the right.
COAST = dict(zip(range(-8, 8), (1, 0, -1, -1, -1, -2, -2, -1, -1, 0, 0, -1, -1, 0, 1, 2), strict=True))


def build_sea(model: Model, rng: np.random.Generator) -> None:
    """Adds the baseplate, its corners cut, with crests of foam along the coast and further out."""
    cells = {(x, y) for x, y in block(-9, 9, -9, 9) if abs(x + 0.5) + abs(y + 0.5) < 15.5}
    masonry(model, cells, 0.0, PLATE, ("sea", "sea", "sea_deep", "sea_light"), rng)
    for x, first in COAST.items():
        if rng.random() < 0.7:
            model.brick("foam", x, first - 1, PLATE, (1, 1), TILE, studs=False)
    for x, y in ((-3, -8), (-1, -4), (0, -8), (3, -8), (6, -3), (7, -4), (-8, -7), (-7, -5), (-8, -2)):
        model.brick("foam", x, y, PLATE, (1, 2) if x % 2 else (1, 1), TILE, studs=False)


def build_island(model: Model, rng: np.random.Generator) -> None:
    """Adds two terraces: a quay of rock, and above it a lawn with a chequered path and flowers."""
    rocks = ("rock", "rock", "rock_dark", "rock_light")
    quay = {(x, y) for x, first in COAST.items() for y in range(first, 8) if abs(x + 0.5) + y < 14.5}
    lawn = {(x, y) for x, y in quay if y >= COAST[x] + 2 and x > -8}
    for course in range(3):
        masonry(model, quay, PLATE * (course + 1), PLATE, (*rocks, "moss") if course == 1 else rocks, rng)
    masonry(model, lawn, QUAY, 2 * PLATE, rocks, rng)
    masonry(model, lawn, QUAY + 2 * PLATE, PLATE, ("grass", "grass", "grass_light"), rng)
    path = block(-1, 7, 2, 3) & lawn
    for x, y in path:
        model.brick("white" if (x + y) % 2 else "red_dark", x, y, GROUND, (1, 1), TILE, studs=False)
    for x, y in block(-4, -1, 0, 1) & lawn:
        model.brick("sand", x, y, GROUND, (1, 1), TILE, studs=False)
    model.box("sand", (-4, -0.95, QUAY), (-2, -0.5, QUAY + 0.4))
    model.box("sand", (-4, -0.5, QUAY), (-2, 0, QUAY + 0.8))
    beds = sorted(lawn - path - block(-6, 0, 0, 7) - block(1, 7, 3, 7))
    for x, y in beds:
        if rng.random() < 0.5:
            build_flower(model, x + rng.uniform(0.3, 0.7), y + rng.uniform(0.3, 0.7), rng)


def build_flower(model: Model, x: float, y: float, rng: np.random.Generator) -> None:
    """Adds a stalk with a five-pointed head to the lawn."""
    height = rng.uniform(0.5, 0.8)
    with model.placed(x, y, GROUND, rng.uniform(0, 72)):
        model.strut("leaf", (0, 0, 0), (0, 0, height), 0.07)
        petals = star(0.33, 5, 0.5)
        model.solid(
            str(rng.choice(("pink", "red", "white", "yellow"))), [level(petals, height), level(petals, height + 0.14)]
        )
        model.cylinder("yellow", height + 0.1, height + 0.22, 0.12, 10, 0.02)
