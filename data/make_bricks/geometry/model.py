"""The model under construction: triangle meshes by material, printed panels, and the frame that parts are placed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from make_bricks.arrays import Array, Pixels, Point, Triangles
from make_bricks.geometry.dimensions import BEVEL, GAP, STUD_HEIGHT, STUD_RADIUS
from make_bricks.geometry.outlines import circle, rectangle
from make_bricks.geometry.rings import level, loft, upright


@dataclass
class Panel:
    """A printed picture on a flat rectangle.

    Attributes:
        image: sRGB picture, (H, W, 3) uint8.
        corners: Bottom left, bottom right, top right and top left, as seen from the front, (4, 3).
    """

    image: Pixels
    corners: Array


@dataclass
class Model:
    """The meshes and printed panels built so far, in studs.

    Attributes:
        parts: By material, the vertices (V, 3) and triangles (F, 3) of each of its solids.
        panels: The printed panels.
    """

    parts: dict[str, list[tuple[Array, Triangles]]] = field(default_factory=dict)
    panels: list[Panel] = field(default_factory=list)
    _pose: Array = field(default_factory=lambda: np.eye(4))

    @contextmanager
    def placed(self, x: float, y: float, z: float = 0.0, yaw: float = 0.0) -> Iterator[None]:
        """Places what the `with` block adds in a frame turned by `yaw` degrees about z, then moved to (x, y, z)."""
        outer = self._pose
        c, s = np.cos(np.radians(yaw)), np.sin(np.radians(yaw))
        self._pose = outer @ np.array([[c, -s, 0, x], [s, c, 0, y], [0, 0, 1, z], [0, 0, 0, 1]])
        try:
            yield
        finally:
            self._pose = outer

    def _to_model(self, points: Array) -> Array:
        return points @ self._pose[:3, :3].T + self._pose[:3, 3]

    def solid(self, material: str, rings: Sequence[Array]) -> None:
        """Adds the solid between a stack of rings (see `loft`)."""
        vertices, triangles = loft(rings)
        self.parts.setdefault(material, []).append((self._to_model(vertices), triangles))

    def box(self, material: str, low: Point, high: Point, bevel: float = BEVEL) -> None:
        """Adds a bevelled box between two opposite corners."""
        (x0, y0, z0), (x1, y1, z1) = low, high
        with self.placed((x0 + x1) / 2, (y0 + y1) / 2):
            self.solid(
                material,
                upright(lambda inset: rectangle(x1 - x0 - 2 * inset, y1 - y0 - 2 * inset, bevel), z0, z1, bevel),
            )

    def cylinder(
        self, material: str, z0: float, z1: float, radius: float, segments: int = 24, bevel: float = BEVEL
    ) -> None:
        """Adds an upright bevelled cylinder about the z axis of the current frame."""
        self.solid(material, upright(lambda inset: circle(radius - inset, segments), z0, z1, bevel))

    def cone(self, material: str, z0: float, z1: float, radius0: float, radius1: float, segments: int = 24) -> None:
        """Adds a truncated cone about the z axis of the current frame."""
        self.solid(material, [level(circle(radius0, segments), z0), level(circle(radius1, segments), z1)])

    def strut(self, material: str, start: ArrayLike, stop: ArrayLike, radius: float, segments: int = 8) -> None:
        """Adds a round bar between two points."""
        a, b = np.asarray(start, float), np.asarray(stop, float)
        axis = (b - a) / np.linalg.norm(b - a)
        side = np.cross(axis, (0.0, 0.0, 1.0) if abs(axis[2]) < 0.9 else (1.0, 0.0, 0.0))
        side /= np.linalg.norm(side)
        ring = circle(radius, segments) @ np.stack([side, np.cross(axis, side)])
        self.solid(material, [a + ring, b + ring])

    def brick(
        self, material: str, x: int, y: int, z: float, size: tuple[int, int], height: float, studs: bool = True
    ) -> None:
        """Adds a brick whose lowest corner is at (x, y, z) and that covers `size` studs."""
        self.box(material, (x + GAP, y + GAP, z), (x + size[0] - GAP, y + size[1] - GAP, z + height))
        for i in range(size[0] if studs else 0):
            for j in range(size[1]):
                self.stud(material, x + i + 0.5, y + j + 0.5, z + height)

    def stud(self, material: str, x: float, y: float, z: float) -> None:
        """Adds a stud that stands at height z."""
        with self.placed(x, y):
            self.cylinder(material, z, z + STUD_HEIGHT, STUD_RADIUS, 20, 0.04)

    def panel(self, image: Pixels, width: float, height: float) -> None:
        """Adds a picture in the xz plane, its lower edge centred on the origin, seen from negative y."""
        x = width / 2
        corners = np.array([(-x, 0, 0), (x, 0, 0), (x, 0, height), (-x, 0, height)], float)
        self.panels.append(Panel(image, self._to_model(corners)))
