"""Camera paths for videos of a trained model."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.fields.field import Field, warp_of
from voxelfield.grids.boxes import box_tensor
from voxelfield.rendering.cameras import Cameras, orbit
from voxelfield.rendering.paths import spiral
from voxelfield.training.trained_model import TrainedModel

# Size of the box of depths in normalised device coordinates, in sizes of the field's own box.
_BEYOND = 10.0


def usual_path(run: TrainedModel, cameras: Cameras, frames: int) -> Cameras:
    """Returns a spiral for a field in normalised device coordinates, whose cameras face the same way, or an orbit.

    Args:
        run: The trained model.
        cameras: Its training cameras, on the CPU.
        frames: Number of cameras on the path.
    """
    centre = run.model.centre
    if run.model.warp is None or not run.model.warp.is_forward_facing:
        return orbit(cameras, centre, frames)
    target = seen_point(run, cameras)
    return spiral(cameras, centre if target is None else target, frames)


def depth_bounds(field: Field) -> Tensor:
    """Returns the box (2, 3), in world units on the CPU, whose depths a depth image distinguishes.

    It is the field's box, or ten times its size in normalised device coordinates, which reach to infinity.
    """
    warp = warp_of(field)
    if warp is None or not warp.is_forward_facing:
        return field.aabb.cpu()
    low, high = box_tensor(warp.aabb, torch.device("cpu"))
    centre = (low + high) / 2
    return torch.stack((centre + _BEYOND * (low - centre), centre + _BEYOND * (high - centre)))


def seen_point(run: TrainedModel, cameras: Cameras) -> Tensor | None:
    """Returns the point (3,) on the most central camera's axis at the mean inverse depth of its image.

    Args:
        run: The trained model.
        cameras: The cameras, on the CPU.

    Returns:
        World units, on the CPU; None if that camera sees nothing solid.
    """
    positions = cameras.c2w[:, :3, 3]
    central = int((positions - positions.mean(dim=0)).norm(dim=-1).argmin())
    view = run.render(cameras, central)
    solid = view.depth[view.opacity > 0.5]
    if len(solid) == 0:
        return None
    pose = cameras.c2w[central]
    return pose[:3, 3] - pose[:3, 2] / float((1 / solid).mean())
