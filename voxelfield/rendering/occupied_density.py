"""The density as rendered: zero in cells that are not occupied."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.fields.field import Field, warp_of
from voxelfield.rendering.occupancy import OccupancyGrid


def occupied_points(field: Field, occupancy: OccupancyGrid, points: Tensor) -> Tensor:
    """Returns which world positions (M, 3) lie in occupied cells of the field's warp, (M,) bool; False outside."""
    warp = warp_of(field)
    return occupancy.contains(points if warp is None else warp.from_world(points)[0])


def occupied_density(field: Field, occupancy: OccupancyGrid, points: Tensor) -> Tensor:
    """Returns the density at world positions (M, 3), (M,) float32 per world unit, 0 where no cell is occupied."""
    return torch.where(occupied_points(field, occupancy, points), field.density(points), 0)
