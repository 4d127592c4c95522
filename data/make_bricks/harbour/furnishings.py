"""Small things that stand by themselves: trees, street lamps, buoys and the billboard."""

from __future__ import annotations

from make_bricks.geometry.dimensions import PLATE
from make_bricks.geometry.model import Model
from make_bricks.geometry.outlines import star
from make_bricks.geometry.rings import level
from make_bricks.harbour.terrain import GROUND, QUAY
from make_bricks.pictures import billboard_picture


def build_tree(model: Model, x: float, y: float, height: float) -> None:
    """Adds a fir of stacked, notched cones to the upper terrace."""
    with model.placed(x, y, GROUND, 31 * x):
        model.cylinder("wood", 0, 0.8, 0.2, 12)
        for k in range(4):
            low, radius = 0.5 + k * height / 5, 0.95 - 0.2 * k
            skirt = star(radius, 8, 0.72)
            rings = [level(skirt, low), level(skirt, low + 0.15), level(0.3 * skirt, low + height / 3.2)]
            model.solid("leaf" if k % 2 == 0 else "grass", rings)
        model.cylinder("yellow", height + 0.45, height + 0.7, 0.14, 10)


def build_lamp(model: Model, x: float, y: float) -> None:
    """Adds a street lamp to the quay."""
    with model.placed(x, y, QUAY):
        model.cylinder("black", 0, 0.25, 0.25, 12)
        model.strut("black", (0, 0, 0), (0, 0, 2.2), 0.08)
        model.cylinder("yellow", 2.2, 2.55, 0.22, 12)
        model.cone("black", 2.55, 2.8, 0.34, 0.1, 12)


def build_buoy(model: Model, x: float, y: float) -> None:
    """Adds a striped buoy that floats on the sea."""
    with model.placed(x, y, PLATE):
        for k, (low, high) in enumerate(((0.75, 0.7), (0.6, 0.48), (0.48, 0.36), (0.36, 0.24))):
            model.cone("white" if k % 2 else "red", 0.4 * k, 0.4 * k + 0.4, low, high)
        model.strut("black", (0, 0, 1.6), (0, 0, 2.3), 0.07)
        model.cylinder("yellow", 2.3, 2.6, 0.2, 14)


def build_billboard(model: Model) -> None:
    """Adds a billboard with the harbour's name behind the lighthouse, facing away from it."""
    with model.placed(-3, 7.7, GROUND, 180):
        for x in (-2.2, 0.0, 2.2):
            model.strut("wood", (x, 0.15, 0), (x, 0.15, 3.4), 0.12)
        model.box("wood_light", (-2.65, 0, 0.75), (2.65, 0.12, 3.45), 0.03)
        with model.placed(0, -0.01, 0.85):
            model.panel(billboard_picture(), 5.0, 2.5)
