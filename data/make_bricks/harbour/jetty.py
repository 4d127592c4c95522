"""The jetty, with what lies on it."""

from __future__ import annotations

import numpy as np

from make_bricks.geometry.dimensions import PLATE
from make_bricks.geometry.frameworks import railing
from make_bricks.geometry.model import Model
from make_bricks.harbour.crate import build_crate
from make_bricks.harbour.terrain import QUAY


def build_jetty(model: Model) -> None:
    """Adds a jetty of planks that leads to the crane, with bollards, a crate, barrels and a railing."""
    for k in range(14):
        y = -1.5 - 0.5 * k
        model.box("wood_light" if k % 3 else "wood", (-6, y, QUAY), (-3, y + 0.44, QUAY + 0.25), 0.04)
    for y in (-2.5, -5.0, -7.5):
        for x in (-5.7, -3.3):
            model.strut("wood", (x, y, PLATE), (x, y, QUAY), 0.22, 12)
        model.strut("wood", (-5.7, y, 0.6), (-3.3, y, 1.5), 0.1)
        model.strut("wood", (-3.3, y, 0.6), (-5.7, y, 1.5), 0.1)
    posts = np.array([(-5.85, y, QUAY + 0.25) for y in np.linspace(-1.6, -7.8, 9)])
    railing(model, "white", posts, 0.9, closed=False)
    for y in (-2.2, -4.4):
        with model.placed(-3.3, y, QUAY + 0.25):
            model.cylinder("black", 0, 0.35, 0.14, 12)
            model.cylinder("black", 0.35, 0.5, 0.22, 12)
    with model.placed(-5.0, -2.4, QUAY + 0.25, 15):
        build_crate(model, 0.95)
    for x, y in ((-4.9, -3.7), (-5.2, -4.4), (-4.5, -4.2)):
        with model.placed(x, y, QUAY + 0.25):
            for k in range(3):
                model.cylinder("navy" if k % 2 else "teal", 0.3 * k, 0.3 * k + 0.3, 0.3, 16)
