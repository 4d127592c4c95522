"""A smooth path through key frames."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from voxelfield.rendering.paths import through_poses
from voxelfield.viewer.drawing.viewpoint import Viewpoint


def between(keys: Sequence[Viewpoint], frames: int, *, closed: bool = False) -> list[Viewpoint]:
    """Returns the stations of a smooth path through key frames, which take equal times.

    Positions, orientations and fields of view follow Catmull-Rom splines, orientations as quaternions. Fields of view
    stay between the smallest and the largest of the key frames.

    Args:
        keys: At least one key frame.
        frames: Number of stations, at least 1. An open path begins and ends at a key frame.
        closed: Whether the path returns to its first key frame, which then is not repeated at the end.

    Raises:
        ValueError: There are no key frames, or ``frames`` is below 1.
    """
    if not keys:
        raise ValueError("keys must be at least one key frame, got none")
    poses = torch.stack([key.matrix for key in keys])
    fovs = torch.tensor([[key.fov] for key in keys], dtype=torch.float64)
    path, between_fovs = through_poses(poses, fovs, frames, closed=closed)
    # A spline overshoots, and there is no field of view beyond 180 degrees.
    inside = between_fovs[:, 0].clamp(fovs.min(), fovs.max())
    return [Viewpoint.of(pose, float(fov)) for pose, fov in zip(path, inside, strict=True)]
