"""Outlines in the plane, in studs."""

from __future__ import annotations

import numpy as np

from make_bricks.arrays import Array


def circle(radius: float, segments: int) -> Array:
    """Returns a counter-clockwise circle about the origin, (segments, 2)."""
    angle = 2 * np.pi * np.arange(segments) / segments
    return radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)


def rectangle(width: float, depth: float, chamfer: float) -> Array:
    """Returns a counter-clockwise rectangle about the origin with its corners cut, (8, 2)."""
    x, y, c = width / 2, depth / 2, chamfer
    return np.array(
        [(x, c - y), (x, y - c), (x - c, y), (c - x, y), (-x, y - c), (-x, c - y), (c - x, -y), (x - c, -y)]
    )


def star(radius: float, points: int, notch: float) -> Array:
    """Returns a star about the origin whose inner corners lie at `notch` times the radius, (2 * points, 2)."""
    outline = circle(radius, 2 * points)
    outline[1::2] *= notch
    return outline


def wedge(inner: float, outer: float, start: float, stop: float, gap: float) -> Array:
    """Returns the sector of an annulus between two angles in radians, narrowed by `gap` on either side, (12, 2)."""
    arcs = []
    for radius, ends in ((outer, (start, stop)), (inner, (stop, start))):
        margin = gap / radius * np.sign(ends[1] - ends[0])
        angle = np.linspace(ends[0] + margin, ends[1] - margin, 6)
        arcs.append(radius * np.stack([np.cos(angle), np.sin(angle)], axis=1))
    return np.concatenate(arcs)
