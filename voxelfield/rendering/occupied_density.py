"""The density as rendered: zero in cells that are not occupied."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.fields.field import Field, warp_of
from voxelfield.rendering.occupancy import OccupancyGrid


def occupied_points(field: Field, occupancy: OccupancyGrid, points: Tensor) -> Tensor:
    """Returns which world positions lie in occupied cells.

    Args:
        field: The field; the cells are in its warp.
        occupancy: The cells, on the points' device.
        points: (M, 3) world positions.

    Returns:
        (M,) bool; False outside the box.
    """
    warp = warp_of(field)
    return occupancy.contains(points if warp is None else warp.from_world(points)[0])


def occupied_density(field: Field, occupancy: OccupancyGrid, points: Tensor) -> Tensor:
    """Evaluates the density as rendered.

    Args:
        field: The field.
        occupancy: The cells in which rays are sampled, on the field's device.
        points: (M, 3) world positions, on the field's device.

    Returns:
        (M,), per world unit, 0 in cells that are not occupied and outside the box; float32.
    """
    return torch.where(occupied_points(field, occupancy, points), field.density(points), 0)
