"""The density as rendered: zero in cells that are not occupied."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.fields.field import Field, warp_of
from voxelfield.rendering.occupancy import OccupancyGrid

MIN_DENSITY = 1e-3
"""Density per world unit up to which space counts as empty, because it is invisible."""

_POINTS = 16384


def occupied_points(field: Field, occupancy: OccupancyGrid, points: Tensor) -> Tensor:
    """Returns which world positions (M, 3) lie in occupied cells of the field's warp, (M,) bool; False outside."""
    warp = warp_of(field)
    return occupancy.contains(points if warp is None else warp.from_world(points)[0])


def occupied_density(field: Field, occupancy: OccupancyGrid, points: Tensor) -> Tensor:
    """Returns the density at world positions (M, 3), (M,) float32 per world unit, 0 where no cell is occupied."""
    return torch.where(occupied_points(field, occupancy, points), field.density(points), 0)


@torch.no_grad()
def is_empty(field: Field, occupancy: OccupancyGrid) -> bool:
    """Returns whether a field is empty: no density at random points of occupied cells reaches ``MIN_DENSITY``.

    A field with densities that are not finite does not count as empty.

    Args:
        field: The field.
        occupancy: The cells in which rays are sampled, on the field's device.
    """
    cells = occupancy.occupied.nonzero()
    if len(cells) == 0:
        return True
    generator = torch.Generator(cells.device).manual_seed(0)
    chosen = cells[torch.randint(len(cells), (_POINTS,), generator=generator, device=cells.device)]
    within = torch.rand(chosen.shape, generator=generator, device=cells.device)
    low, high = occupancy.aabb
    points = low + (chosen + within) / torch.tensor(occupancy.occupied.shape, device=cells.device) * (high - low)
    warp = warp_of(field)
    if warp is not None:
        points = warp.to_world(points)[0]
    return bool((occupied_density(field, occupancy, points) <= MIN_DENSITY).all())
