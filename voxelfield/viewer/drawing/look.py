"""Settings that determine which part of a field is drawn, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from voxelfield.grids.boxes import Box

Mode = Literal["rgb", "depth", "normal", "opacity", "samples per ray", "occupancy"]
MODES: tuple[Mode, ...] = get_args(Mode)

AXES = ("x", "y", "z")


@dataclass(frozen=True)
class Slice:
    """A plane on which the density is drawn.

    Attributes:
        axis: World axis perpendicular to the plane: 0, 1 or 2.
        position: Where along that axis, world units.
        within: Box that the plane ends at, world units, where nothing is cropped; None: what matters of the scene.
    """

    axis: int
    position: float
    within: Box | None = None


@dataclass(frozen=True)
class Look:
    """How a field is shown.

    Attributes:
        mode: What colours mean.
        exposure: Stops by which colours are brightened, as light; for the mode ``rgb``.
        crop: Box outside of which nothing is drawn, world units, to the precision of a cell of the occupancy grid.
        cut: Where the density is drawn on a plane, over a pale picture; None: nowhere.
        photo_share: Share of the picture's width, from the left, in which a photograph covers it, if there is one.
    """

    mode: Mode = "rgb"
    exposure: float = 0.0
    crop: Box | None = None
    cut: Slice | None = None
    photo_share: float = 0.0
