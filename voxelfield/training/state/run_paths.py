"""Camera paths that suit what a run shows."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField
from voxelfield.grids.boxes import box_tensor
from voxelfield.rendering.cameras import Cameras, orbit
from voxelfield.rendering.paths import spiral
from voxelfield.training.trained_model import TrainedModel

# Size of the box of depths in normalised device coordinates, in sizes of the box of what matters.
_BEYOND = 10.0


def usual_path(run: TrainedModel, cameras: Cameras, frames: int) -> Cameras:
    """Returns a spiral for a run in normalised device coordinates, whose cameras face the same way, otherwise an orbit.

    Args:
        run: The run.
        cameras: Its training cameras, on the CPU.
        frames: Number of cameras on the path.
    """
    centre = run.field.centre
    if run.field.warp is None or not run.field.warp.is_forward_facing:
        return orbit(cameras, centre, frames)
    target = seen_point(run, cameras)
    return spiral(cameras, centre if target is None else target, frames)


def depth_bounds(field: RadianceField) -> Tensor:
    """Returns a box (2, 3) that bounds the depths that are worth telling apart, world units, on the CPU.

    It is the box around all that the field represents. Normalised device coordinates reach to infinity, so for them it
    is ten times as large as the box of what matters.

    Args:
        field: The field.
    """
    if field.warp is None or not field.warp.is_forward_facing:
        return field.aabb.cpu()
    low, high = box_tensor(field.warp.aabb, torch.device("cpu"))
    centre = (low + high) / 2
    return torch.stack((centre + _BEYOND * (low - centre), centre + _BEYOND * (high - centre)))


def seen_point(run: TrainedModel, cameras: Cameras) -> Tensor | None:
    """Returns what the most central of some cameras looks at: a point (3,) on its axis, at the mean nearness.

    Args:
        run: The run.
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
    depth = 1 / float((1 / solid).mean())
    pose = cameras.c2w[central]
    return pose[:3, 3] - depth * pose[:3, 2]
