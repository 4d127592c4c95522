"""Densities of a field where there is something, for a histogram."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.occupied_density import occupied_density

LEAST = 1e-3
"""Lower densities, per world unit, count as this one: nothing of them shows."""

_POINTS = 16384


@torch.no_grad()
def log_densities(field: RadianceField, occupancy: OccupancyGrid, step: int) -> Tensor:
    """Returns logarithms, to the base 10, of the density at random points of occupied cells.

    Those of a sharp surface have two peaks, one of empty space and one of matter; those of fog lie between.

    Args:
        field: The field.
        occupancy: Its cells, on its device.
        step: Seeds the points, which leave torch's own random numbers alone.

    Returns:
        (M,) float32 on the field's device; per world unit, at least ``log10(LEAST)``. Empty if no cell is occupied.
    """
    device = occupancy.aabb.device
    cells = occupancy.occupied.nonzero()
    if len(cells) == 0:
        return torch.empty(0, device=device)
    generator = torch.Generator(device).manual_seed(step)
    chosen = cells[torch.randint(len(cells), (_POINTS,), generator=generator, device=device)]
    within = torch.rand(chosen.shape, generator=generator, device=device)
    low, high = occupancy.aabb
    shape = torch.tensor(occupancy.occupied.shape, device=device)
    points = low + (chosen + within) / shape * (high - low)
    if field.boxes is not None:
        points = field.boxes.to_world(points)[0]
    return occupied_density(field, occupancy, points).float().clamp(min=LEAST).log10()


def is_empty(field: RadianceField, occupancy: OccupancyGrid) -> bool:
    """Tells whether no cell is occupied, or the density at random points of those that are is next to nothing.

    A density that is not finite is not next to nothing.

    Args:
        field: The field.
        occupancy: Its cells, on its device.
    """
    return bool((log_densities(field, occupancy, 0) <= math.log10(LEAST)).all())
