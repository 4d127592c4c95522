"""Where samples lie, as a function of the rays that they lie on: what cameras are refined by."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.grids.nested_boxes import NestedBoxes
from voxelfield.ops import PackedSamples
from voxelfield.ops._internal.march_pieces import world_distances
from voxelfield.ops.ray_sums import spread


def positions_on_rays(
    samples: PackedSamples, origins: Tensor, directions: Tensor, boxes: NestedBoxes | None = None
) -> Tensor:
    """Computes the samples' positions again, from their rays and their distances along them.

    Marching has no derivative. Distances and the choice of samples are constants here, so the gradient in an origin is
    the sum of the gradients in the positions of its ray's samples, and that in a direction the sum of these gradients
    times the samples' distances. Sums have a fixed order.

    Args:
        samples: M samples of R rays; with nested boxes, in their frame.
        origins: (R, 3) float32 (float64 for float64 ``samples.t``), world frame. Differentiable.
        directions: (R, 3), in the dtype of ``origins``. Differentiable.
        boxes: Those of the field, if it has any.

    Returns:
        (M, 3) in the dtype of ``origins``, equal to ``samples.positions`` up to rounding; rows of no ray are NaN, as
        they are there.
    """
    rows = samples.positions.shape[0]
    both = spread(torch.cat((origins, directions), dim=1), samples.ray_offsets, rows)
    if boxes is None:
        positions = both[:, :3] + samples.t[:, None] * both[:, 3:]
    else:
        with torch.no_grad():
            t = world_distances(boxes.numbers, samples, origins.detach(), directions.detach())
        positions = boxes.to_row_of(both[:, :3] + t[:, None] * both[:, 3:], samples.positions)
    return torch.where(samples.positions.isnan(), samples.positions, positions)
