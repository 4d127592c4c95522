"""Which part of a field is displayed, how, and from where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from voxelfield.datasets import camera_path
from voxelfield.grids.boxes import Box
from voxelfield.rendering.cameras import Cameras

Mode = Literal["rgb", "depth", "normal", "opacity", "samples per ray", "occupancy"]
MODES: tuple[Mode, ...] = get_args(Mode)

FIELDS_OF_VIEW = (math.radians(camera_path.FIELDS_OF_VIEW[0]), math.radians(camera_path.FIELDS_OF_VIEW[1]))
"""Smallest and largest field of view that a browser or a file may request, radians."""

SMALLEST_SIDE = 2
"""Pixels along a side of a picture: normals are differences between neighbours."""


@dataclass(frozen=True)
class Display:
    """How a field is displayed.

    Attributes:
        mode: The displayed quantity.
        crop: Box outside of which nothing is drawn, world units, rounded to cells of the occupancy grid.
        photo_fraction: Fraction of the width, from the left, that is covered by the photograph taken from there.
    """

    mode: Mode = "rgb"
    crop: Box | None = None
    photo_fraction: float = 0.0


@dataclass(frozen=True)
class Viewpoint:
    """A pinhole camera without an image size.

    Attributes:
        c2w: 16 numbers, camera to world, row by row; OpenGL camera axes (x right, y up, looking along -z), world units.
        fov: Vertical field of view, radians.
    """

    c2w: tuple[float, ...]
    fov: float

    @classmethod
    def of(cls, c2w: Tensor, fov: float) -> Viewpoint:
        """Returns the viewpoint of a pose (4, 4) on any device, and a vertical field of view in radians."""
        return cls(tuple(c2w.detach().to("cpu", torch.float32).flatten().tolist()), float(fov))

    @property
    def matrix(self) -> Tensor:
        """The pose (4, 4), float32 on the CPU."""
        return torch.tensor(self.c2w, dtype=torch.float32).view(4, 4)

    def cameras(self, height: int, width: int, rows: tuple[int, int] | None = None) -> Cameras:
        """Returns one camera, on the CPU.

        Args:
            height: Height of the whole image, pixels.
            width: Width of the whole image, pixels.
            rows: First row, and the one after the last, of a band of the image, possibly outside of it; None for all.
        """
        first, end = (0, height) if rows is None else rows
        focal = 0.5 * height / math.tan(0.5 * self.fov)
        intrinsics = torch.tensor([[focal, focal, 0.5 * width, 0.5 * height - first]], dtype=torch.float32)
        return Cameras(self.matrix[None], intrinsics, width, end - first)


def viewpoint_of(cameras: Cameras, index: int, aspect: float | None = None) -> Viewpoint:
    """Returns the viewpoint of a photograph, wide enough for all of it; lens distortion is ignored.

    That of a panorama shows 90 degrees around its optical axis.

    Args:
        cameras: The cameras.
        index: Index of the camera.
        aspect: Width over height of the image in which the photograph must fit; None for that of the photograph.
    """
    one = cameras[[index]].pinholes()
    fx, fy, cx, cy = one.intrinsics[0].tolist()
    width, height = one.size(0)
    # A viewpoint's principal point is in the middle, so the longer of the two sides decides.
    tangent = max(cy, height - cy) / fy
    if aspect is not None:
        tangent = max(tangent, max(cx, width - cx) / fx / aspect)
    return Viewpoint.of(cameras.c2w[index], 2 * math.atan(tangent))
