"""The tug."""

from __future__ import annotations

import numpy as np

from make_bricks.arrays import Array
from make_bricks.geometry.dimensions import PLATE
from make_bricks.geometry.frameworks import railing
from make_bricks.geometry.model import Model
from make_bricks.geometry.rings import level
from make_bricks.harbour.openings import build_window
from make_bricks.pictures import number_picture


def hull(scale: float) -> Array:
    """Returns the outline of the hull (14, 2), its bow towards positive x."""
    starboard = [(-3.3, 0), (-3.2, -0.8), (-2.7, -1.25), (-1, -1.45), (1, -1.4), (2.2, -1.05), (3.1, -0.5), (3.6, 0)]
    port = [(x, -y) for x, y in starboard[-2:0:-1]]
    return np.array(starboard + port) * scale


def build_tug(model: Model) -> None:
    """Adds the tug: hull, deck, cabin, wheelhouse, funnel, mast and tyres."""
    with model.placed(3.0, -5.0, PLATE, 12):
        bands = (("black", 0.0, 0.55, 0.86, 0.94), ("red", 0.55, 0.85, 0.94, 0.97), ("white", 0.85, 1.4, 0.97, 1.04))
        for material, z0, z1, scale0, scale1 in bands:
            model.solid(material, [level(hull(scale0), z0), level(hull(scale1), z1)])
        model.solid("wood_light", [level(hull(0.94), 1.3), level(hull(0.94), 1.45)])
        railing(model, "yellow", level(hull(0.99), 1.4), 0.6, closed=True)
        for x, y in ((-2.6, -0.5), (-2.6, 0.5), (1.5, -0.5), (1.5, 0.5), (2.4, 0.0)):
            model.stud("wood_light", x, y, 1.45)
        build_cabin(model)
        for x in (-2.2, -1.0, 0.2, 1.4):
            for side in (-1, 1):
                y = side * (1.42 if x < 1 else 1.35)
                model.strut("black", (x, y, 0.75), (x, y + 0.2 * side, 0.75), 0.36, 20)
                model.strut("rock_light", (x, y, 0.75), (x, y + 0.23 * side, 0.75), 0.15, 14)


def build_cabin(model: Model) -> None:
    """Adds what stands on the deck: cabin, wheelhouse, funnel and mast."""
    model.box("white", (-1.9, -0.85, 1.45), (0.9, 0.85, 2.7))
    model.box("teal", (-2.0, -0.95, 2.7), (1.0, 0.95, 2.9))
    for yaw, side in ((0, -1), (180, 1)):
        with model.placed(-1.15, 0.87 * side, 1.6, yaw):
            model.panel(number_picture(), 1.3, 0.9)
        with model.placed(0.25, 0.88 * side, 1.75, yaw):
            build_window(model, 0.7, 0.7)
    model.box("white", (-0.5, -0.65, 2.9), (0.8, 0.65, 4.0))
    for x, y, yaw in ((0.15, -0.68, 0), (0.15, 0.68, 180), (0.83, 0, 90), (-0.53, 0, 270)):
        with model.placed(x, y, 3.1, yaw):
            build_window(model, 0.9, 0.7)
    model.box("orange", (-0.65, -0.8, 4.0), (1.0, 0.8, 4.2))
    for x, y in ((-0.25, -0.4), (-0.25, 0.4), (0.6, -0.4), (0.6, 0.4)):
        model.stud("orange", x, y, 4.2)
    with model.placed(-1.3, 0):
        for k, material in enumerate(("black", "yellow", "red", "yellow", "black")):
            model.cylinder(material, 2.9 + 0.36 * k, 3.26 + 0.36 * k, 0.42, 24)
    model.strut("white", (0.2, 0, 4.2), (0.2, 0, 6.4), 0.07)
    model.strut("white", (0.2, -0.6, 5.5), (0.2, 0.6, 5.5), 0.05)
    for y in (-0.6, 0.6):
        model.strut("black", (0.2, y, 5.5), (-0.5, y, 4.2), 0.04)
    model.box("red", (-0.65, -0.03, 5.8), (0.15, 0.03, 6.3), 0.005)
