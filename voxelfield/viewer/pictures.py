"""Pictures of a field from any viewpoint."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxelfield.datasets import camera_path
from voxelfield.grids.boxes import box_tensor
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.view_pictures import picture
from voxelfield.trained.trained_model import TrainedModel

MODES = ("rgb", "depth")
"""Quantities that the page can show."""

FIELDS_OF_VIEW = (math.radians(camera_path.FIELDS_OF_VIEW[0]), math.radians(camera_path.FIELDS_OF_VIEW[1]))
"""Smallest and largest field of view that a browser may request, radians."""

# In place of infinity, in nearest depths.
_FARTHEST = 1e6


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
        """Returns one camera of an image, or of the rows of a band of it, from the first to the one after the last."""
        first, end = (0, height) if rows is None else rows
        focal = 0.5 * height / math.tan(0.5 * self.fov)
        intrinsics = torch.tensor([[focal, focal, 0.5 * width, 0.5 * height - first]], dtype=torch.float32)
        return Cameras(self.matrix[None], intrinsics, width, end - first)


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


def viewpoint_of_camera(camera: Any) -> Viewpoint:
    """Returns the viewpoint of a viser camera, whose axes are x right, y down, z forward."""
    from viser import transforms

    c2w = torch.eye(4, dtype=torch.float64)
    c2w[:3, :3] = torch.from_numpy(transforms.SO3(np.asarray(camera.wxyz)).as_matrix())
    c2w[:3, 1:3] *= -1
    c2w[:3, 3] = torch.from_numpy(np.asarray(camera.position, dtype=np.float64))
    return Viewpoint.of(c2w, camera.fov)


def wxyz_of(c2w: Tensor) -> np.ndarray:
    """Returns the quaternion of a pose (4, 4) in the axes of viser's cameras."""
    from viser import transforms

    rotation = c2w[:3, :3].double().clone()
    rotation[:, 1:] *= -1
    quaternion: np.ndarray = transforms.SO3.from_matrix(rotation.numpy()).wxyz
    return quaternion


class Painter:
    """Draws a field that does not change, with the settings of its evaluation."""

    def __init__(self, run: TrainedModel) -> None:
        self._run = run
        self._content = content_box(run)
        self._renderer = functools.cache(lambda supersampling: run.renderer(supersampling=supersampling))

    @torch.no_grad()
    def picture(
        self,
        viewpoint: Viewpoint,
        mode: str,
        height: int,
        width: int,
        *,
        rows: tuple[int, int] | None = None,
        sharp: bool = False,
    ) -> Tensor:
        """Draws a picture of one of :data:`MODES`, or a band of its rows, (rows, width, 3) uint8 on the CPU.

        A sharp one has as many rays per pixel as the run's evaluation instead of one.
        """
        renderer = self._renderer(self._run.trainer.evaluation.supersampling if sharp else 1)
        view = renderer.view(viewpoint.cameras(height, width, rows).to(self._run.model.device), 0)
        return to_uint8(picture(view, mode, self._depths(viewpoint.matrix[:3, 3]))).cpu()

    def _depths(self, camera: Tensor) -> tuple[float, float]:
        """Returns the depths of the first and the last colour for a camera at a position (3,), world units."""
        (low, high), warp = self._content, self._run.model.warp
        usual = 0.25 * float((high - low).norm())
        if warp is not None:
            near = warp.near if warp.is_forward_facing else usual
            return near, _FARTHEST * near
        near = max(usual, float((camera - camera.clamp(low, high)).norm()))
        far = float(torch.maximum((camera - low).abs(), (camera - high).abs()).norm())
        return near, max(far, 1.001 * near)


def content_box(run: TrainedModel) -> Tensor:
    """Returns the part of space that matters, (2, 3) world units on the CPU.

    It is the smallest of nested boxes, or the box of the occupied cells.
    """
    if run.model.warp is not None:
        return box_tensor(run.model.warp.aabb, torch.device("cpu"))
    occupancy = run.occupancy
    return (occupancy.bounds() if bool(occupancy.occupied.any()) else occupancy.aabb).cpu()
