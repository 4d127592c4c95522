"""Builds and renders `bricks`, the scene that comes with the repository: a toy-brick harbour of our own design.

Everything is made here, geometry, printed pictures, light and cameras, so the scene carries no one else's
licence. It is path-traced by Mitsuba 3 and written in the NeRF-synthetic (Blender) layout. Mitsuba is needed for
this script alone, never for training:

    pip install mitsuba pillow numpy                                       # rendered with mitsuba 3.9
    python data/make_bricks.py                                             # what is committed: 200x200 pixels
    python data/make_bricks.py --size 800 --spp 256 --out data/bricks_800  # the same cameras, finer images

Lengths are in studs (one stud pitch is 1) and become world units only when the meshes are handed to the renderer.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont

Array = NDArray[np.float64]
Cells = set[tuple[int, int]]
Point = tuple[float, float, float]

logger = logging.getLogger("make_bricks")

WORLD_PER_STUD = 0.098
WORLD_OFFSET = (0.0, 0.0, -0.74)  # keeps every part in every picture
BRICK, PLATE, TILE = 1.2, 0.4, 0.32  # heights; a tile has no studs, and hides those it lies on
GAP, BEVEL = 0.03, 0.05
STUD_RADIUS, STUD_HEIGHT = 0.3, 0.2
QUAY, GROUND = 1.6, 2.8  # heights of the two terraces of the island

CAMERA_ANGLE_X = 0.6911112070083618  # NeRF-synthetic's
CAMERA_DISTANCE = 4.0

# sRGB colour and finish
MATERIALS = {
    "sea": ("#1f6fb5", "gloss"),
    "sea_deep": ("#175a9c", "gloss"),
    "sea_light": ("#3f97cf", "gloss"),
    "foam": ("#e4eef0", "matt"),
    "rock": ("#8b9095", "matt"),
    "rock_dark": ("#63686e", "matt"),
    "rock_light": ("#b1b4b3", "matt"),
    "moss": ("#6f7f4f", "matt"),
    "sand": ("#d9c28c", "matt"),
    "grass": ("#4f9a3c", "gloss"),
    "grass_light": ("#7fb83f", "gloss"),
    "leaf": ("#1f7340", "matt"),
    "wood": ("#8f5a33", "matt"),
    "wood_light": ("#b98350", "matt"),
    "white": ("#eeebe2", "gloss"),
    "cream": ("#ecd9a8", "matt"),
    "red": ("#cc2a23", "gloss"),
    "red_dark": ("#92241f", "matt"),
    "orange": ("#ea7a1e", "gloss"),
    "yellow": ("#f3bf1b", "gloss"),
    "navy": ("#1d2f57", "gloss"),
    "teal": ("#1d8a86", "matt"),
    "pink": ("#e583a6", "matt"),
    "black": ("#24262a", "gloss"),
}


# ---------------------------------------------------------------------------------------------------- geometry


def circle(radius: float, segments: int = 24) -> Array:
    """Counter-clockwise circle about the origin, (segments, 2)."""
    angle = 2 * np.pi * np.arange(segments) / segments
    return radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)


def rectangle(width: float, depth: float, chamfer: float) -> Array:
    """Rectangle about the origin with its corners cut, counter-clockwise, (8, 2)."""
    x, y, c = width / 2, depth / 2, chamfer
    return np.array(
        [(x, c - y), (x, y - c), (x - c, y), (c - x, y), (-x, y - c), (-x, c - y), (c - x, -y), (x - c, -y)]
    )


def star(radius: float, points: int, notch: float) -> Array:
    """Star about the origin whose inner corners lie at `notch` times the radius, (2 * points, 2)."""
    outline = circle(radius, 2 * points)
    outline[1::2] *= notch
    return outline


def wedge(inner: float, outer: float, start: float, stop: float, gap: float) -> Array:
    """Sector of a ring between two angles in radians, narrowed by `gap` at either side, (12, 2)."""
    arcs = []
    for radius, ends in ((outer, (start, stop)), (inner, (stop, start))):
        margin = gap / radius * np.sign(ends[1] - ends[0])
        angle = np.linspace(ends[0] + margin, ends[1] - margin, 6)
        arcs.append(radius * np.stack([np.cos(angle), np.sin(angle)], axis=1))
    return np.concatenate(arcs)


def level(outline: Array, z: float) -> Array:
    """Lifts an outline (N, 2) to height z, (N, 3)."""
    return np.concatenate([outline, np.full((len(outline), 1), z)], axis=1)


def upright(outline: Callable[[float], Array], z0: float, z1: float, bevel: float) -> list[Array]:
    """Rings of a prism with bevelled top and bottom edges.

    Args:
        outline: Gives the outline (N, 2) drawn inwards by the inset that it is called with.
        z0: Height of the bottom.
        z1: Height of the top.
        bevel: Size of the bevel, in height and in inset.

    Returns:
        Four rings (N, 3), from the bottom to the top.
    """
    steps = ((bevel, z0), (0.0, z0 + bevel), (0.0, z1 - bevel), (bevel, z1))
    return [level(outline(inset), z) for inset, z in steps]


def loft(rings: Sequence[Array]) -> tuple[Array, NDArray[np.uint32]]:
    """Skins a stack of rings and closes both ends.

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


@dataclass
class Panel:
    """A printed picture on a flat rectangle.

    Attributes:
        image: sRGB picture, (H, W, 3) uint8.
        corners: Bottom left, bottom right, top right and top left as a viewer in front of it sees them, (4, 3).
    """

    image: NDArray[np.uint8]
    corners: Array


@dataclass
class Model:
    """Meshes gathered by material, and printed panels, all in studs."""

    parts: dict[str, list[tuple[Array, NDArray[np.uint32]]]] = field(default_factory=dict)
    panels: list[Panel] = field(default_factory=list)
    _pose: Array = field(default_factory=lambda: np.eye(4))

    @contextmanager
    def placed(self, x: float, y: float, z: float = 0.0, yaw: float = 0.0) -> Iterator[None]:
        """Builds the body of the `with` in a frame turned by `yaw` degrees about z, then moved to (x, y, z)."""
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
        """Adds the skin of a stack of rings (see `loft`)."""
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
        """Adds a cut cone about the z axis of the current frame."""
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
        """Adds a stud that stands on height z."""
        with self.placed(x, y):
            self.cylinder(material, z, z + STUD_HEIGHT, STUD_RADIUS, 20, 0.04)

    def panel(self, image: NDArray[np.uint8], width: float, height: float) -> None:
        """Adds a picture in the xz plane, its lower edge centred on the origin, seen from negative y."""
        x = width / 2
        corners = np.array([(-x, 0, 0), (x, 0, 0), (x, 0, height), (-x, 0, height)], float)
        self.panels.append(Panel(image, self._to_model(corners)))


def cover(cells: Cells, sizes: Sequence[tuple[int, int]], rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Covers cells with bricks of random sizes, without overlap.

    Args:
        cells: Lower corners of the unit cells to cover.
        sizes: Brick sizes to draw from; (1, 1) fills what is left.
        rng: Source of the draws.

    Returns:
        One (x, y, width, depth) for each brick.
    """
    free = set(cells)
    bricks: list[tuple[int, ...]] = []
    for x, y in sorted(cells):
        if (x, y) not in free:
            continue
        for width, depth in (*rng.permutation(sizes).tolist(), (1, 1)):
            under = {(x + i, y + j) for i in range(width) for j in range(depth)}
            if under <= free:
                free -= under
                bricks.append((x, y, width, depth))
                break
    return bricks


LARGE = ((2, 4), (4, 2), (2, 2), (2, 3), (3, 2), (1, 2), (2, 1))
SLIM = ((1, 2), (2, 1), (1, 3), (3, 1))


def masonry(
    model: Model,
    cells: Cells,
    z: float,
    height: float,
    palette: Sequence[str],
    rng: np.random.Generator,
    sizes: Sequence[tuple[int, int]] = LARGE,
) -> None:
    """Lays one course of bricks over cells, in colours drawn from the palette."""
    for x, y, width, depth in cover(cells, sizes, rng):
        model.brick(str(rng.choice(palette)), x, y, z, (width, depth), height)


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


# ---------------------------------------------------------------------------------------------------- pictures


def colour(hexadecimal: str) -> tuple[int, int, int]:
    """Splits a colour #rrggbb into its bytes."""
    red, green, blue = bytes.fromhex(hexadecimal[1:])
    return red, green, blue


def lettering(draw: ImageDraw.ImageDraw, centre: tuple[float, float], text: str, size: int, fill: str) -> None:
    """Writes a heavy line of text about a point."""
    font = ImageFont.load_default(size)
    draw.text(centre, text, fill=fill, font=font, anchor="mm", stroke_width=size // 22, stroke_fill=fill)


def checker(columns: int, rows: int, cell: int, dark: str, light: str) -> Image.Image:
    """Draws a chequered field."""
    odd = np.add.outer(np.arange(rows), np.arange(columns)) % 2 == 1
    pixels = np.where(odd[..., None], colour(dark), colour(light)).astype(np.uint8)
    return Image.fromarray(pixels.repeat(cell, 0).repeat(cell, 1))


def billboard_picture() -> NDArray[np.uint8]:
    """Draws the harbour's name over a brick wall, with a chequered frame."""
    image = checker(36, 18, 32, "#1d2f57", "#f4f1e8")
    draw = ImageDraw.Draw(image)
    draw.rectangle((64, 64, 1087, 511), fill="#e9dfc6")
    for row in range(7):
        for column in range(-1, 9):
            x, y = 64 + column * 128 + 64 * (row % 2), 64 + row * 64
            box = (max(x + 5, 64), y + 5, min(x + 123, 1087), y + 59)
            if box[2] > box[0]:
                draw.rectangle(box, fill=("#cf5a3c", "#b9472f", "#de7650")[(row * 5 + column * 3) % 3])
    draw.rounded_rectangle((120, 120, 1031, 455), 40, fill="#f3bf1b", outline="#24262a", width=14)
    lettering(draw, (576, 225), "VOXEL", 170, "#24262a")
    lettering(draw, (576, 370), "HARBOUR", 130, "#92241f")
    return np.array(image)


def mural_picture() -> NDArray[np.uint8]:
    """Draws a sail over waves, beside a test chart of stripes that grow finer."""
    image = Image.new("RGB", (640, 640), "#f4f1e8")
    draw = ImageDraw.Draw(image)
    for k, fill in enumerate(("#fbe3a6", "#f8cf7a", "#f3b45a")):
        draw.rectangle((0, 80 + k * 80, 640, 160 + k * 80), fill=fill)
    draw.rectangle((0, 0, 640, 80), fill="#f4f1e8")
    draw.ellipse((400, 110, 570, 280), fill="#cc2a23")
    draw.polygon([(240, 60), (240, 350), (60, 350)], fill="#ffffff")
    draw.polygon([(265, 100), (265, 350), (390, 350)], fill="#1d8a86")
    draw.polygon([(40, 365), (410, 365), (350, 430), (100, 430)], fill="#1d2f57")
    for row, fill in enumerate(("#3f97cf", "#1f6fb5", "#175a9c")):
        for x in range(-80 + 40 * (row % 2), 640, 80):
            draw.pieslice((x, 400 + row * 38, x + 80, 480 + row * 38), 180, 360, fill=fill)
        draw.rectangle((0, 440 + row * 38, 640, 640), fill=fill)
    draw.rectangle((0, 540, 640, 640), fill="#ffffff")
    x, width = 10, 40
    while x + width < 640 and width >= 8:
        draw.rectangle((x, 550, x + width // 2, 630), fill="#24262a")
        x, width = x + width, width - 1
    draw.rectangle((0, 0, 639, 639), outline="#1d2f57", width=12)
    return np.array(image)


def clock_picture() -> NDArray[np.uint8]:
    """Draws a clock face that shows ten past ten."""
    image = Image.new("RGB", (256, 256), "#1d2f57")
    draw = ImageDraw.Draw(image)
    draw.ellipse((12, 12, 243, 243), fill="#f4f1e8", outline="#f3bf1b", width=12)
    for hour in range(12):
        x, y = np.cos(hour * np.pi / 6), np.sin(hour * np.pi / 6)
        draw.line((128 + 75 * x, 128 + 75 * y, 128 + 95 * x, 128 + 95 * y), fill="#24262a", width=12)
    draw.line((128, 128, 80, 98), fill="#24262a", width=16)
    draw.line((128, 128, 196, 84), fill="#cc2a23", width=12)
    return np.array(image)


def number_picture() -> NDArray[np.uint8]:
    """Draws the tug's number between hazard stripes."""
    image = Image.new("RGB", (512, 256), "#f3bf1b")
    draw = ImageDraw.Draw(image)
    for x in range(-256, 512, 96):
        draw.polygon([(x, 256), (x + 48, 256), (x + 304, 0), (x + 256, 0)], fill="#24262a")
    draw.rectangle((110, 28, 401, 227), fill="#f4f1e8")
    lettering(draw, (256, 128), "No 7", 130, "#92241f")
    return np.array(image)


# ---------------------------------------------------------------------------------------------------- the harbour

# First row of the island in each column of studs from x = -8 to 7: a coast with a bay on the right.
COAST = dict(zip(range(-8, 8), (1, 0, -1, -1, -1, -2, -2, -1, -1, 0, 0, -1, -1, 0, 1, 2), strict=True))
TOWER = (-3.0, 4.0)
TOWER_RADII = (2.35, 2.25, 2.15, 2.05, 1.95, 1.85, 1.75)


def block(x0: int, x1: int, y0: int, y1: int) -> Cells:
    """Cells of a rectangle, upper bounds excluded."""
    return {(x, y) for x in range(x0, x1) for y in range(y0, y1)}


def build_sea(model: Model, rng: np.random.Generator) -> None:
    """Lays the baseplate, its corners cut, with crests of foam along the coast and further out."""
    cells = {(x, y) for x, y in block(-9, 9, -9, 9) if abs(x + 0.5) + abs(y + 0.5) < 15.5}
    masonry(model, cells, 0.0, PLATE, ("sea", "sea", "sea_deep", "sea_light"), rng)
    for x, first in COAST.items():
        if rng.random() < 0.7:
            model.brick("foam", x, first - 1, PLATE, (1, 1), TILE, studs=False)
    for x, y in ((-3, -8), (-1, -4), (0, -8), (3, -8), (6, -3), (7, -4), (-8, -7), (-7, -5), (-8, -2)):
        if (x, y) in cells:
            model.brick("foam", x, y, PLATE, (1, 2) if x % 2 else (1, 1), TILE, studs=False)


def build_island(model: Model, rng: np.random.Generator) -> None:
    """Raises two terraces: a quay of rock, and above it a lawn with a chequered walk and flowers."""
    rocks = ("rock", "rock", "rock_dark", "rock_light")
    quay = {(x, y) for x, first in COAST.items() for y in range(first, 8) if abs(x + 0.5) + y < 14.5}
    lawn = {(x, y) for x, y in quay if y >= COAST[x] + 2 and x > -8}
    for course in range(3):
        masonry(model, quay, PLATE * (course + 1), PLATE, (*rocks, "moss") if course == 1 else rocks, rng)
    masonry(model, lawn, QUAY, 2 * PLATE, rocks, rng)
    masonry(model, lawn, QUAY + 2 * PLATE, PLATE, ("grass", "grass", "grass_light"), rng)
    walk = block(-1, 7, 2, 3) & lawn
    for x, y in walk:
        model.brick("white" if (x + y) % 2 else "red_dark", x, y, GROUND, (1, 1), TILE, studs=False)
    for x, y in block(-4, -1, 0, 1) & lawn:
        model.brick("sand", x, y, GROUND, (1, 1), TILE, studs=False)
    model.box("sand", (-4, -0.95, QUAY), (-2, -0.5, QUAY + 0.4))
    model.box("sand", (-4, -0.5, QUAY), (-2, 0, QUAY + 0.8))
    beds = sorted(lawn - walk - block(-6, 0, 0, 7) - block(1, 7, 3, 7))
    for x, y in beds:
        if rng.random() < 0.5:
            build_flower(model, x + rng.uniform(0.3, 0.7), y + rng.uniform(0.3, 0.7), rng)


def build_flower(model: Model, x: float, y: float, rng: np.random.Generator) -> None:
    """Plants a stalk with a five-pointed head."""
    height = rng.uniform(0.5, 0.8)
    with model.placed(x, y, GROUND, rng.uniform(0, 72)):
        model.strut("leaf", (0, 0, 0), (0, 0, height), 0.07)
        petals = star(0.33, 5, 0.5)
        model.solid(
            str(rng.choice(("pink", "red", "white", "yellow"))), [level(petals, height), level(petals, height + 0.14)]
        )
        model.cylinder("yellow", height + 0.1, height + 0.22, 0.12, 10, 0.02)


def build_tree(model: Model, x: float, y: float, z: float, height: float) -> None:
    """Plants a fir of stacked, notched cones."""
    with model.placed(x, y, z, 31 * x):
        model.cylinder("wood", 0, 0.8, 0.2, 12)
        for k in range(4):
            low, radius = 0.5 + k * height / 5, 0.95 - 0.2 * k
            skirt = star(radius, 8, 0.72)
            rings = [level(skirt, low), level(skirt, low + 0.15), level(0.3 * skirt, low + height / 3.2)]
            model.solid("leaf" if k % 2 == 0 else "grass", rings)
        model.cylinder("yellow", height + 0.45, height + 0.7, 0.14, 10)


def build_window(model: Model, width: float, height: float) -> None:
    """Sets a barred window facing negative y; its pane lies in the xz plane of the current frame."""
    half, bar = width / 2, 0.12
    model.box("navy", (-half, 0, 0), (half, 0.18, height), 0.02)
    for x in (-half, half):
        model.box("white", (x - bar, -0.2, -bar), (x + bar, 0.1, height + bar), 0.03)
    for z in (0.0, height):
        model.box("white", (-half, -0.2, z - bar), (half, 0.1, z + bar), 0.03)
    model.box("white", (-0.05, -0.1, 0), (0.05, 0.04, height), 0.02)
    model.box("white", (-half, -0.1, height / 2 - 0.05), (half, 0.04, height / 2 + 0.05), 0.02)


def build_door(model: Model, width: float, height: float, material: str) -> None:
    """Sets a panelled door in the xz plane of the current frame, facing negative y."""
    half = width / 2
    model.box("white", (-half - 0.15, -0.05, 0), (half + 0.15, 0.3, height + 0.15), 0.03)
    model.box(material, (-half, -0.12, 0), (half, 0.2, height), 0.03)
    for z in (0.2, height / 2 + 0.1):
        model.box("cream", (-half + 0.15, -0.17, z), (half - 0.15, 0, z + height / 2 - 0.35), 0.03)
    model.strut("yellow", (half - 0.1, -0.25, height / 2), (half - 0.1, -0.1, height / 2), 0.07)


def build_lighthouse(model: Model, rng: np.random.Generator) -> None:
    """Stacks the plinth, the banded tower, its gallery, the lamp and the flag."""
    masonry(model, block(-6, 0, 1, 7), GROUND, BRICK, ("rock_dark", "rock", "rock_dark"), rng)
    base = GROUND + BRICK
    with model.placed(*TOWER):
        for course, radius in enumerate(TOWER_RADII):
            build_tower_course(model, base + course * BRICK, radius, course)
        with model.placed(0, -2.3, base):
            build_door(model, 1.0, 1.9, "teal")
        for course, yaw in ((2, 0), (3, 90), (4, 180), (5, 270), (3, 210), (5, 45)):
            turn = np.radians(yaw - 90)
            reach = TOWER_RADII[course] + 0.03
            with model.placed(reach * np.cos(turn), reach * np.sin(turn), base + course * BRICK + 0.15, yaw):
                build_window(model, 0.6, 0.95)
        build_lantern(model, base + len(TOWER_RADII) * BRICK)


def build_tower_course(model: Model, z: float, radius: float, course: int) -> None:
    """Lays one round course of the tower: ten bricks, in a running bond over the course below."""
    model.cylinder("black", z, z + BRICK, radius - 0.2, 48)
    step = 2 * np.pi / 10
    for k in range(10):
        start = (k + 0.5 * (course % 2)) * step

        def outline(inset: float, start: float = start) -> Array:
            return wedge(0.6 * radius, radius - inset, start, start + step, 0.03)

        model.solid("white" if course % 2 else "red", upright(outline, z + 0.02, z + BRICK - 0.02, BEVEL))


def build_lantern(model: Model, z: float) -> None:
    """Tops the tower with a railed gallery, a ribbed lamp behind bars, a roof and a chequered flag."""
    model.cylinder("black", z, z + PLATE, 2.5, 48)
    for angle in np.linspace(0, 360, 12, endpoint=False):
        with model.placed(0, 0, z, float(angle)):
            model.box("yellow", (1.6, -0.12, -0.35), (2.35, 0.12, 0.02), 0.03)
    railing(model, "white", level(circle(2.35, 16), z + PLATE), 1.0, closed=True)
    z += PLATE
    model.cylinder("white", z, z + PLATE, 1.35, 32)
    for k in range(6):
        model.cylinder("orange" if k % 2 else "yellow", z + 0.4 + 0.3 * k, z + 0.7 + 0.3 * k, 0.85 - 0.15 * (k % 2), 24)
    posts, middle = level(circle(1.2, 8), z + PLATE), np.array([0, 0, 0.9])
    for post, after in zip(posts, np.roll(posts, -1, axis=0), strict=True):
        model.strut("black", post, post + 2 * middle, 0.08)
        model.strut("black", post + middle, after + middle, 0.05)
    z += PLATE + 1.8
    model.cylinder("white", z, z + 0.25, 1.6, 32)
    for k in range(4):
        model.cone(
            "teal" if k % 2 else "red", z + 0.25 + 0.32 * k, z + 0.57 + 0.32 * k, 1.45 - 0.3 * k, 1.2 - 0.3 * k, 32
        )
    z += 0.25 + 4 * 0.32
    model.cylinder("yellow", z, z + 0.3, 0.25, 16)
    model.strut("white", (0, 0, z), (0, 0, z + 2.4), 0.08)
    for k in range(8):
        for row in range(4):
            sway = 0.12 * np.sin(np.pi * k / 4) - 0.06
            corner = (0.08 + 0.22 * k, sway - 0.04, z + 1.4 + 0.22 * row)
            far = (corner[0] + 0.22, sway + 0.04, corner[2] + 0.22)
            model.box("black" if (k + row) % 2 else "white", corner, far, 0.005)


def build_house(model: Model, rng: np.random.Generator) -> None:
    """Builds the keeper's house: brick walls, windows, a mural, a shingled roof, a chimney and an aerial."""
    palette = ("cream", "cream", "cream", "sand", "orange")
    walls = block(1, 7, 3, 7) - block(2, 6, 4, 6)
    door, panes = {(2, 3)}, {(4, 3), (5, 3), (2, 6), (4, 6), (5, 6), (1, 4), (1, 5)}
    for course in range(3):
        openings = (door if course < 2 else set()) | (panes if course else set())
        masonry(model, walls - openings, GROUND + course * BRICK, BRICK, palette, rng, SLIM)
    sill = GROUND + BRICK + 0.15
    with model.placed(2.5, 3.25, GROUND):
        build_door(model, 0.8, 2.2, "teal")
    for x, y, yaw, width in ((5, 3.22, 0, 1.75), (5, 6.78, 180, 1.75), (2.5, 6.78, 180, 0.75), (1.22, 5, 270, 1.75)):
        with model.placed(x, y, sill, yaw):
            build_window(model, width, 2.1)
    with model.placed(7.02, 5, GROUND + 0.2, 90):
        model.panel(mural_picture(), 3.4, 3.4)
    build_roof(model, GROUND + 3 * BRICK, rng)
    with model.placed(2, 6, GROUND + 3 * BRICK):
        for k in range(4):
            model.brick("rock_dark" if k % 2 else "red_dark", -1, -1, 0.5 + 0.8 * k, (1, 1), 0.8, studs=False)
        model.box("white", (-1.1, -1.1, 3.7), (0.1, 0.1, 3.9))
        with model.placed(-0.5, -0.5):
            model.cylinder("black", 3.9, 4.3, 0.28, 16)


def build_roof(model: Model, z: float, rng: np.random.Generator) -> None:
    """Roofs the house: a gabled loft, three rows of shingles on either side, a ridge, a clock and an aerial."""
    gable = np.array([(3, z), (7, z), (7, z + 0.3), (5, z + 2.1), (3, z + 0.3)])
    model.solid("white", [np.insert(gable, 0, x, axis=1) for x in (1.0, 7.0)])
    with model.placed(7.02, 5, z + 0.2, 90):
        model.panel(clock_picture(), 1.2, 1.2)
    run, rise = 2.6 / 3, 0.72
    for yaw in (0, 180):
        with model.placed(4, 5, z - 0.05, yaw):
            for row in range(3):
                y, low = -2.6 + row * run, row * rise
                profile = np.array(
                    [(y, low), (y + run + 0.1, low + rise), (y + run + 0.1, low + rise + 0.15), (y, low + 0.3)]
                )
                for k in range(11):
                    left = -3.6 + 0.65 * k + 0.05 + (0.32 if row % 2 else 0.0)
                    right = min(left + 0.58, 3.6)
                    rings = [np.insert(profile, 0, x, axis=1) for x in (left, right)]
                    model.solid(str(rng.choice(("red_dark", "red", "red", "orange"))), rings)
    for k in range(9):
        x = 0.4 + 0.8 * k
        model.strut("red_dark", (x + 0.03, 5, z + 2.2), (x + 0.77, 5, z + 2.2), 0.26, 12)
    model.strut("black", (6.2, 5, z + 2.2), (6.2, 5, z + 5.2), 0.07)
    for k in range(5):
        reach = 0.9 - 0.14 * k
        model.strut("black", (6.2 - reach, 5, z + 3.3 + 0.42 * k), (6.2 + reach, 5, z + 3.3 + 0.42 * k), 0.05)


def build_billboard(model: Model) -> None:
    """Puts up the harbour's name behind the lighthouse, facing away from it."""
    with model.placed(-3, 7.7, GROUND, 180):
        for x in (-2.2, 0.0, 2.2):
            model.strut("wood", (x, 0.15, 0), (x, 0.15, 3.4), 0.12)
        model.box("wood_light", (-2.65, 0, 0.75), (2.65, 0.12, 3.45), 0.03)
        with model.placed(0, -0.01, 0.85):
            model.panel(billboard_picture(), 5.0, 2.5)


def build_jetty(model: Model) -> None:
    """Runs a jetty of planks out to the crane, with bollards, a crate, barrels and a railing."""
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


def build_crate(model: Model, size: float) -> None:
    """Knocks together a crate of slats that stands on the origin."""
    half, slats = size / 2, 4
    model.box("wood", (-half + 0.05, -half + 0.05, 0), (half - 0.05, half - 0.05, size - 0.05), 0.02)
    for k in range(slats):
        low = k * size / slats
        model.box("wood_light", (-half, -half, low + 0.03), (half, half, low + size / slats - 0.03), 0.02)
    for x in (-half, half):
        for y in (-half, half):
            model.box("wood", (x - 0.08, y - 0.08, 0), (x + 0.08, y + 0.08, size), 0.02)


def build_crane(model: Model) -> None:
    """Builds a lattice crane at the head of the jetty, a crate on its hook."""
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


def hull(scale: float) -> Array:
    """Outline of the tug's hull, its bow towards positive x, (16, 2)."""
    starboard = [(-3.3, 0), (-3.2, -0.8), (-2.7, -1.25), (-1, -1.45), (1, -1.4), (2.2, -1.05), (3.1, -0.5), (3.6, 0)]
    port = [(x, -y) for x, y in starboard[-2:0:-1]]
    return np.array(starboard + port) * scale


def build_tug(model: Model) -> None:
    """Moors the tug: hull, deck, cabin, wheelhouse, funnel, mast and tyres."""
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
    """Stacks the tug's upper works on its deck."""
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


def build_buoy(model: Model, x: float, y: float) -> None:
    """Floats a striped buoy."""
    with model.placed(x, y, PLATE):
        for k, (low, high) in enumerate(((0.75, 0.7), (0.6, 0.48), (0.48, 0.36), (0.36, 0.24))):
            model.cone("white" if k % 2 else "red", 0.4 * k, 0.4 * k + 0.4, low, high)
        model.strut("black", (0, 0, 1.6), (0, 0, 2.3), 0.07)
        model.cylinder("yellow", 2.3, 2.6, 0.2, 14)


def build_lamp(model: Model, x: float, y: float, z: float) -> None:
    """Stands a street lamp on height z."""
    with model.placed(x, y, z):
        model.cylinder("black", 0, 0.25, 0.25, 12)
        model.strut("black", (0, 0, 0), (0, 0, 2.2), 0.08)
        model.cylinder("yellow", 2.2, 2.55, 0.22, 12)
        model.cone("black", 2.55, 2.8, 0.34, 0.1, 12)


def build_harbour(seed: int = 7) -> Model:
    """Builds the whole model.

    Args:
        seed: Seed of the brick layout and of the colours drawn from palettes.

    Returns:
        The model, in studs, its baseplate on z = 0.
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
        build_tree(model, x, y, GROUND, height)
    for x, y in ((-7.6, -4.0), (7.4, -1.0)):
        build_buoy(model, x, y)
    for x, y in ((-1.5, -0.5), (3.5, -0.5), (-6.5, 0.5)):
        build_lamp(model, x, y, QUAY)
    return model


# ---------------------------------------------------------------------------------------------------- cameras


def look_at_origin(azimuth: float, elevation: float) -> Array:
    """Poses a camera that sees the origin from `CAMERA_DISTANCE`.

    Args:
        azimuth: Angle of the camera about z, in radians, from x towards y.
        elevation: Angle of the camera above the xy plane, in radians, below a right angle.

    Returns:
        Camera-to-world matrix (4, 4): x right, y up, the camera looks along -z.
    """
    flat = np.cos(elevation)
    back = np.array([flat * np.cos(azimuth), flat * np.sin(azimuth), np.sin(elevation)])
    right = np.array([-np.sin(azimuth), np.cos(azimuth), 0.0])
    c2w = np.eye(4)
    c2w[:3, :3] = np.stack([right, np.cross(back, right), back], axis=1)
    c2w[:3, 3] = CAMERA_DISTANCE * back
    return c2w


def train_cameras(count: int, seed: int = 11) -> Array:
    """Spreads cameras over the upper hemisphere: a jittered Fibonacci lattice in random order, (count, 4, 4)."""
    rng = np.random.default_rng(seed)
    low, high = np.sin(np.radians([5.0, 85.0]))
    index = rng.permutation(count)
    height = low + (high - low) * (index + rng.random(count)) / count
    azimuth = index * np.pi * (3 - np.sqrt(5)) + rng.normal(0, 0.08, count)
    return np.stack([look_at_origin(a, e) for a, e in zip(azimuth, np.arcsin(height), strict=True)])


def test_cameras(count: int) -> Array:
    """Circles the model twice while the elevation swings from 8 to 65 degrees and back, (count, 4, 4)."""
    turn = 2 * np.pi * np.arange(count) / count
    elevation = np.radians(36.5 - 28.5 * np.cos(turn))
    return np.stack([look_at_origin(2 * a + 0.3, e) for a, e in zip(turn, elevation, strict=True)])


# ---------------------------------------------------------------------------------------------------- rendering


def linear(encoded: ArrayLike) -> Array:
    """Decodes sRGB values in [0, 1]."""
    value = np.asarray(encoded, float)
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def encode_rgba(film: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Turns a rendered film into an image file's pixels.

    Args:
        film: Linear colour multiplied by alpha, and alpha, (H, W, 4).

    Returns:
        sRGB colour not multiplied by alpha, and alpha, (H, W, 4); nothing but zeros where alpha is zero.
    """
    alpha = np.clip(film[..., 3:], 0.0, 1.0)
    rgb = np.clip(film[..., :3] / np.maximum(film[..., 3:], 1e-6), 0.0, 1.0)
    rgb = np.where(rgb <= 0.0031308, 12.92 * rgb, 1.055 * rgb ** (1 / 2.4) - 0.055)
    pixels = np.rint(255 * np.concatenate([rgb, alpha], axis=-1)).astype(np.uint8)
    pixels[pixels[..., 3] == 0] = 0
    return pixels


def sky() -> NDArray[np.float32]:
    """Paints the surroundings: pale blue above, warm at the horizon, dim below, (32, 64, 3) linear."""
    up = np.cos(np.pi * (np.arange(32) + 0.5) / 32)
    stops = [-1.0, -0.05, 0.05, 1.0]
    colours = np.array([(0.26, 0.26, 0.28), (0.36, 0.35, 0.34), (0.80, 0.76, 0.72), (0.56, 0.64, 0.76)])
    rows = np.stack([np.interp(up, stops, channel) for channel in colours.T], axis=1)
    return np.repeat(rows[:, None], 64, axis=1).astype(np.float32)


def reflectance(rgb: dict[str, Any], finish: str) -> dict[str, Any]:
    """Describes a surface of the given colour to Mitsuba."""
    if finish == "matt":
        return {"type": "diffuse", "reflectance": rgb}
    return {"type": "roughplastic", "diffuse_reflectance": rgb, "alpha": 0.2, "nonlinear": True}


def mitsuba_mesh(mi: Any, vertices: Array, triangles: NDArray[np.uint32], bsdf: Any, uv: Array | None = None) -> Any:
    """Hands a triangle mesh, given in studs, to Mitsuba."""
    properties = mi.Properties()
    properties["bsdf"] = mi.load_dict(bsdf)
    mesh = mi.Mesh("mesh", len(vertices), len(triangles), has_vertex_texcoords=uv is not None, props=properties)
    parameters = mi.traverse(mesh)
    world = vertices * WORLD_PER_STUD + WORLD_OFFSET
    parameters["vertex_positions"] = world.astype(np.float32).ravel()
    parameters["faces"] = triangles.astype(np.uint32).ravel()
    if uv is not None:
        parameters["vertex_texcoords"] = uv.astype(np.float32).ravel()
    parameters.update()
    return mesh


def mitsuba_scene(mi: Any, model: Model) -> Any:
    """Assembles meshes, panels, a soft sun and the sky into a Mitsuba scene."""
    sun = mi.ScalarTransform4f().look_at(origin=[-3.4, -4.4, 5.6], target=[0, 0, 0], up=[0, 0, 1])
    scene: dict[str, Any] = {
        "type": "scene",
        "integrator": {"type": "path", "max_depth": 6, "hide_emitters": True},
        "sky": {
            "type": "envmap",
            "bitmap": mi.Bitmap(sky()),
            "to_world": mi.ScalarTransform4f().rotate([1, 0, 0], 90),
        },
        "sun": {
            "type": "rectangle",
            "to_world": sun,
            "emitter": {"type": "area", "radiance": {"type": "rgb", "value": [46.0, 43.0, 38.0]}},
        },
    }
    for name, parts in model.parts.items():
        code, finish = MATERIALS[name]
        rgb = {"type": "rgb", "value": linear(np.array(colour(code)) / 255).tolist()}
        starts = np.cumsum([0] + [len(vertices) for vertices, _ in parts[:-1]])
        vertices = np.concatenate([vertices for vertices, _ in parts])
        triangles = np.concatenate([faces + start for (_, faces), start in zip(parts, starts, strict=True)])
        scene[name] = mitsuba_mesh(mi, vertices, triangles, reflectance(rgb, finish))
    square = np.array([(0, 1), (1, 1), (1, 0), (0, 0)], float)
    halves = np.array([(0, 1, 2), (0, 2, 3)], np.uint32)
    for k, panel in enumerate(model.panels):
        picture = {"type": "bitmap", "bitmap": mi.Bitmap(panel.image), "raw": False}
        scene[f"panel{k}"] = mitsuba_mesh(mi, panel.corners, halves, reflectance(picture, "matt"), square)
    return mi.load_dict(scene)


class Renderer:
    """The scene, loaded into Mitsuba once in a process.

    Args:
        size: Side of the square images in pixels.
        spp: Samples a pixel; Mitsuba rounds it up to suit its sampler.
    """

    def __init__(self, size: int, spp: int) -> None:
        import drjit
        import mitsuba

        drjit.set_thread_count(1)
        mitsuba.set_variant("scalar_rgb")
        # Mitsuba's type stubs describe its other variants
        self._mi: Any = mitsuba
        self._size, self._spp = size, spp
        self._scene = mitsuba_scene(mitsuba, build_harbour())

    def render(self, c2w: Array, seed: int) -> NDArray[np.uint8]:
        """Renders one view, (size, size, 4) straight-alpha sRGB."""
        sensor = self._mi.load_dict(
            {
                "type": "perspective",
                "fov": float(np.degrees(CAMERA_ANGLE_X)),
                "fov_axis": "x",
                # Mitsuba's cameras look along +z with x to the left.
                "to_world": self._mi.ScalarTransform4f(c2w @ np.diag([-1.0, 1.0, -1.0, 1.0])),
                "sampler": {"type": "multijitter", "sample_count": self._spp},
                "film": {
                    "type": "hdrfilm",
                    "width": self._size,
                    "height": self._size,
                    "pixel_format": "rgba",
                    "component_format": "float32",
                    "rfilter": {"type": "box"},
                },
            }
        )
        return encode_rgba(np.array(self._mi.render(self._scene, sensor=sensor, seed=seed)))


_renderer: Renderer | None = None


def start_worker(size: int, spp: int) -> None:
    """Loads the scene in a worker process."""
    global _renderer
    _renderer = Renderer(size, spp)


def render_file(job: tuple[int, Path, Array]) -> Path:
    """Renders one (seed, path, camera) in a worker process and saves it."""
    seed, path, c2w = job
    assert _renderer is not None
    Image.fromarray(_renderer.render(c2w, seed)).save(path, optimize=True)
    return path


def write_transforms(folder: Path, split: str, cameras: Array) -> None:
    """Writes transforms_{split}.json."""
    frames = [
        {"file_path": f"./{split}/r_{k}", "transform_matrix": c2w.round(9).tolist()} for k, c2w in enumerate(cameras)
    ]
    content = {"camera_angle_x": CAMERA_ANGLE_X, "frames": frames}
    (folder / f"transforms_{split}.json").write_text(json.dumps(content, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "bricks", help="folder to write")
    parser.add_argument("--size", type=int, default=200, help="side of the images in pixels")
    parser.add_argument("--spp", type=int, default=144, help="samples a pixel")
    parser.add_argument(
        "--views",
        type=int,
        nargs=2,
        default=(100, 25),
        metavar=("TRAIN", "TEST"),
        help="number of views; the cameras depend on it",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    return parser.parse_args()


def main() -> None:
    """Renders both splits."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parse_arguments()
    splits = {"train": train_cameras(arguments.views[0]), "test": test_cameras(arguments.views[1])}
    jobs = []
    for split, cameras in splits.items():
        (arguments.out / split).mkdir(parents=True, exist_ok=True)
        write_transforms(arguments.out, split, cameras)
        jobs += [(arguments.out / split / f"r_{k}.png", c2w) for k, c2w in enumerate(cameras)]
    begin = time.perf_counter()
    # Mitsuba's thread pool does not survive a fork
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, context, start_worker, (arguments.size, arguments.spp)) as pool:
        tasks = [(seed, path, c2w) for seed, (path, c2w) in enumerate(jobs)]
        for done, path in enumerate(pool.map(render_file, tasks), start=1):
            logger.info("%d/%d %s, %.0f s", done, len(jobs), path, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
