"""Solids as stacks of rings: outlines at a height, and the triangles that join them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from make_bricks.arrays import Array, Triangles


def level(outline: Array, z: float) -> Array:
    """Returns an outline (N, 2) at height z, (N, 3)."""
    return np.concatenate([outline, np.full((len(outline), 1), z)], axis=1)


def upright(outline: Callable[[float], Array], z0: float, z1: float, bevel: float) -> list[Array]:
    """Returns the rings of a prism with bevelled top and bottom edges.

    Args:
        outline: Returns the outline (N, 2), moved inwards by the inset that it is called with.
        z0: Height of the bottom.
        z1: Height of the top.
        bevel: Size of the bevel, in height and in inset.

    Returns:
        Four rings (N, 3), from the bottom to the top.
    """
    steps = ((bevel, z0), (0.0, z0 + bevel), (0.0, z1 - bevel), (bevel, z1))
    return [level(outline(inset), z) for inset, z in steps]


def loft(rings: Sequence[Array]) -> tuple[Array, Triangles]:
    """Joins a stack of rings by triangles and closes both ends.

    Args:
        rings: K rings (N, 3), each star-shaped about its centroid.

    Returns:
        Vertices (V, 3) and triangles (F, 3), their normals pointing outwards.
    """
    count, size = len(rings), len(rings[0])
    vertices = np.concatenate([*rings, rings[0].mean(0, keepdims=True), rings[-1].mean(0, keepdims=True)])
    here = np.arange(size)
    after = (here + 1) % size
    faces = []
    for k in range(count - 1):
        low, high = k * size, (k + 1) * size
        faces.append(np.stack([low + here, low + after, high + after], axis=1))
        faces.append(np.stack([low + here, high + after, high + here], axis=1))
    bottom, top = np.full(size, count * size), np.full(size, count * size + 1)
    faces.append(np.stack([bottom, after, here], axis=1))
    last = (count - 1) * size
    faces.append(np.stack([top, last + here, last + after], axis=1))
    triangles = np.concatenate(faces).astype(np.uint32)
    a, b, c = (vertices[triangles[:, k]] - vertices.mean(0) for k in range(3))
    if np.einsum("ij,ij->", a, np.cross(b, c)) < 0:
        triangles = triangles[:, ::-1]
    return vertices, triangles
