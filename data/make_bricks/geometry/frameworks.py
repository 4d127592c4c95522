"""Structures of round bars: railings and lattice girders."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from make_bricks.arrays import Array
from make_bricks.geometry.model import Model


def railing(model: Model, material: str, posts: Array, height: float, closed: bool) -> None:
    """Adds posts at points (N, 3) and two rails from each to the next."""
    up = np.array([0.0, 0.0, height])
    for post in posts:
        model.strut(material, post, post + up, 0.07)
    followers = np.roll(posts, -1, axis=0) if closed else posts[1:]
    for a, b in zip(posts, followers, strict=False):
        model.strut(material, a + up, b + up, 0.06)
        model.strut(material, a + up / 2, b + up / 2, 0.045)


def lattice(
    model: Model, material: str, start: ArrayLike, stop: ArrayLike, width: float, taper: float, bays: int
) -> None:
    """Adds a square lattice girder between two points; its width shrinks to `taper` times itself."""
    a, b = np.asarray(start, float), np.asarray(stop, float)
    axis = (b - a) / np.linalg.norm(b - a)
    side = np.cross(axis, (0.0, 1.0, 0.0))
    side /= np.linalg.norm(side)
    square = np.array([(1, 1), (-1, 1), (-1, -1), (1, -1)]) @ np.stack([side, np.cross(axis, side)]) * width / 2
    fractions = np.linspace(0.0, 1.0, bays + 1)
    frames = [a + f * (b - a) + square * (1 + f * (taper - 1)) for f in fractions]
    for corner in range(4):
        model.strut(material, frames[0][corner], frames[-1][corner], 0.08)
    for bay, (low, high) in enumerate(pairwise(frames)):
        for corner in range(4):
            after = (corner + 1) % 4
            model.strut(material, high[corner], high[after], 0.05)
            first, second = (corner, after) if bay % 2 else (after, corner)
            model.strut(material, low[first], high[second], 0.05)
