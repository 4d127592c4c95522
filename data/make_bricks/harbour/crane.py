"""The lattice crane at the head of the jetty."""

from __future__ import annotations

import numpy as np

from make_bricks.geometry.frameworks import lattice
from make_bricks.geometry.model import Model
from make_bricks.harbour.crate import build_crate
from make_bricks.harbour.openings import build_window
from make_bricks.harbour.terrain import QUAY


def build_crane(model: Model) -> None:
    """Adds the crane, with a crate on its hook."""
    with model.placed(-4.5, -6.6, QUAY + 0.25, 14):
        model.box("rock_dark", (-1.1, -0.9, 0), (1.1, 0.9, 0.3))
        model.cylinder("black", 0.3, 0.6, 0.75, 24)
        lattice(model, "yellow", (0, 0, 0.6), (0, 0, 5.0), 0.9, 0.8, 6)
        model.box("yellow", (-1.3, -0.6, 4.9), (0.55, 0.6, 5.25))
        model.box("yellow", (-0.55, -0.6, 5.25), (0.55, 0.6, 6.5))
        for yaw in (0, 90, 180):
            turn = np.radians(yaw - 90)
            with model.placed(0.58 * np.cos(turn), 0.63 * np.sin(turn), 5.5, yaw):
                build_window(model, 0.7, 0.75)
        for x in (-0.4, 0.0, 0.4):
            model.stud("yellow", x, 0.0, 6.5)
        model.box("rock_dark", (-2.2, -0.5, 4.8), (-1.2, 0.5, 5.7))
        lattice(model, "yellow", (0.55, 0, 5.3), (6.6, 0, 7.4), 0.75, 0.4, 9)
        model.strut("black", (-1.7, 0, 5.7), (-0.3, 0, 7.6), 0.05)
        model.strut("black", (-0.3, 0, 6.5), (-0.3, 0, 7.6), 0.08)
        model.strut("black", (-0.3, 0, 7.6), (6.5, 0, 7.5), 0.05)
        model.strut("black", (6.5, 0, 7.3), (6.5, 0, 4.2), 0.05)
        with model.placed(6.5, 0, 3.0, 20):
            build_crate(model, 0.9)
            for x in (-0.45, 0.45):
                for y in (-0.45, 0.45):
                    model.strut("black", (x, y, 0.9), (0, 0, 1.4), 0.04)
