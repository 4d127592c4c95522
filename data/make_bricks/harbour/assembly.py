"""The whole harbour, put together from its parts."""

from __future__ import annotations

import numpy as np

from make_bricks.geometry.model import Model
from make_bricks.harbour.crane import build_crane
from make_bricks.harbour.furnishings import build_billboard, build_buoy, build_lamp, build_tree
from make_bricks.harbour.house import build_house
from make_bricks.harbour.jetty import build_jetty
from make_bricks.harbour.lighthouse import build_lighthouse
from make_bricks.harbour.terrain import build_island, build_sea
from make_bricks.harbour.tug import build_tug


def build_harbour(seed: int = 7) -> Model:
    """Builds the whole harbour.

    Args:
        seed: Seed of the layout of bricks and of the colours drawn from palettes.

    Returns:
        The model, in studs; the bottom of its baseplate lies at z = 0.
    """
    model, rng = Model(), np.random.default_rng(seed)
    build_sea(model, rng)
    build_island(model, rng)
    build_lighthouse(model, rng)
    build_house(model, rng)
    build_billboard(model)
    build_jetty(model)
    build_crane(model)
    build_tug(model)
    for x, y, height in ((-6.4, 2.9, 2.6), (-6.4, 5.4, 3.0), (0.6, 7.4, 3.2), (0.4, 1.6, 2.0)):
        build_tree(model, x, y, height)
    for x, y in ((-7.6, -4.0), (7.4, -1.0)):
        build_buoy(model, x, y)
    for x, y in ((-1.5, -0.5), (3.5, -0.5), (-6.5, 0.5)):
        build_lamp(model, x, y)
    return model
