"""Single pinhole views without an image size, such as those of a viewer's users."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.rigid import exp_se3, moved, pose_matrices, quaternions, rotations

# Signs of a camera's axes in viser (x right, y down, z forward), from those of OpenGL, and the other way round.
_FLIPPED = torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)


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

    @property
    def wxyz(self) -> np.ndarray:
        """The orientation as a quaternion (4,), real part first, in the axes of viser's cameras."""
        return quaternions((self.matrix[:3, :3].double() * _FLIPPED)[None])[0].numpy()

    def fitted(self, aspect: float) -> Viewpoint:
        """Returns the viewpoint widened such that an image of an aspect shows the square in the middle of its rows."""
        return replace(self, fov=2 * math.atan(math.tan(0.5 * self.fov) / min(1.0, aspect)))

    def cameras(self, height: int, width: int, rows: tuple[int, int] | None = None) -> Cameras:
        """Returns one camera of an image, or of the rows of a band of it, from the first to the one after the last."""
        first, end = (0, height) if rows is None else rows
        focal = 0.5 * height / math.tan(0.5 * self.fov)
        intrinsics = torch.tensor([[focal, focal, 0.5 * width, 0.5 * height - first]], dtype=torch.float32)
        return Cameras(self.matrix[None], intrinsics, width, end - first)


def viewpoint_of_camera(camera: Any) -> Viewpoint:
    """Returns the viewpoint of one of viser's cameras."""
    axes = rotations(torch.tensor(camera.wxyz, dtype=torch.float64)[None])[0] * _FLIPPED
    return Viewpoint.of(pose_matrices(axes, torch.tensor(camera.position, dtype=torch.float64)), camera.fov)


def viewpoint_of(cameras: Cameras, index: int, aspect: float | None = None) -> Viewpoint:
    """Returns the viewpoint of a photograph, wide enough for all of it in an image of an aspect; without distortion.

    The viewpoint of a panorama shows 90 degrees around the optical axis.
    """
    one = cameras[[index]].pinholes()
    fx, fy, cx, cy = one.intrinsics[0].tolist()
    width, height = one.size(0)
    # A viewpoint's principal point is in the middle, so the longer of the two sides decides.
    tangent = max(cy, height - cy) / fy
    if aspect is not None:
        tangent = max(tangent, max(cx, width - cx) / fx / aspect)
    return Viewpoint.of(cameras.c2w[index], 2 * math.atan(tangent))


def turned(viewpoint: Viewpoint, centre: Tensor, up: Tensor, angles: Tensor) -> list[Viewpoint]:
    """Returns a viewpoint turned about an axis ``up`` (3,) through ``centre`` (3,) by angles (N,), radians."""
    turns = exp_se3(F.pad(angles[:, None] * up, (0, 3)).double())
    poses = moved(turns @ moved(viewpoint.matrix.double(), centre.tolist(), -1), centre.tolist())
    return [Viewpoint.of(pose, viewpoint.fov) for pose in poses]
