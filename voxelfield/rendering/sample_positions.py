"""Sample positions as a differentiable function of their rays, for the refinement of cameras."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.ops import PackedSamples
from voxelfield.ops.ray_sums import spread
from voxelfield.warps.warp import Warp


def positions_on_rays(samples: PackedSamples, origins: Tensor, directions: Tensor, warp: Warp | None = None) -> Tensor:
    """Recomputes the samples' positions from their rays and their distances along them.

    Marching is not differentiable. Distances and the choice of samples are constants here, so the gradient with respect
    to an origin is the sum of the gradients with respect to the positions of its ray's samples, and the gradient with
    respect to a direction is the sum of these gradients times the samples' distances. Sums have a fixed order.

    Args:
        samples: M samples of R rays, in warped coordinates.
        origins: (R, 3) float32 (float64 for float64 ``samples.t``), world frame. Differentiable.
        directions: (R, 3), in the dtype of ``origins``. Differentiable.
        warp: The field's warp; None for the world frame.

    Returns:
        (M, 3) in the dtype of ``origins``, equal to ``samples.positions`` up to rounding; rows that belong
        to no ray are NaN in both.
    """
    rows = samples.positions.shape[0]
    both = spread(torch.cat((origins, directions), dim=1), samples.ray_offsets, rows)
    if warp is None:
        positions = both[:, :3] + samples.t[:, None] * both[:, 3:]
    else:
        with torch.no_grad():
            t = warp.world_distances(samples, origins.detach(), directions.detach())
        positions = warp.from_world_near(both[:, :3] + t[:, None] * both[:, 3:], samples.positions)
    return torch.where(samples.positions.isnan(), samples.positions, positions)
