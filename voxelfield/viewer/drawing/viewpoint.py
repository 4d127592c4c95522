"""Viewpoints: camera poses with a field of view."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from voxelfield.datasets import camera_path
from voxelfield.rendering.cameras import Cameras

FIELDS_OF_VIEW = (math.radians(camera_path.FIELDS_OF_VIEW[0]), math.radians(camera_path.FIELDS_OF_VIEW[1]))
"""Smallest and largest field of view that a browser or a file may ask for, radians."""


@dataclass(frozen=True)
class Viewpoint:
    """A pinhole camera without a size.

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
        """Returns the one camera that sees this in an image.

        Args:
            height: Height of the whole image, pixels.
            width: Width of the whole image, pixels.
            rows: First row, and the one after the last, of a band of the image; they may lie outside of it. None: all.
        """
        first, end = (0, height) if rows is None else rows
        focal = 0.5 * height / math.tan(0.5 * self.fov)
        intrinsics = torch.tensor([[focal, focal, 0.5 * width, 0.5 * height - first]], dtype=torch.float32)
        return Cameras(self.matrix[None], intrinsics, width, end - first)


def viewpoint_of(cameras: Cameras, index: int, aspect: float | None = None) -> Viewpoint:
    """Returns the viewpoint from which a photograph was taken, with all of the photograph in view.

    What a lens does to the photograph is left out.

    Args:
        cameras: The cameras.
        index: Which of them.
        aspect: Width over height of the image that is to hold the photograph; None: that of the photograph.
    """
    fx, fy, cx, cy = cameras.intrinsics[index].tolist()
    width, height = cameras.size(index)
    # The principal point stays in the middle, so the farther side of the photograph decides.
    up = max(cy, height - cy) / fy
    across = max(cx, width - cx) / fx
    tangent = up if aspect is None else max(up, across / aspect)
    return Viewpoint.of(cameras.c2w[index], 2 * math.atan(tangent))
