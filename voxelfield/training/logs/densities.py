"""Densities of a field in its occupied cells, for a histogram."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from voxelfield.models.model import Model
from voxelfield.rendering.occupied_density import occupied_density

MIN_DENSITY = 1e-3
"""Lower densities, per world unit, count as this one, because they are invisible."""

_POINTS = 16384


@torch.no_grad()
def log_densities(model: Model, step: int) -> Tensor:
    """Returns the base-10 logarithms of the density at random points of occupied cells.

    For a sharp surface the distribution has two peaks, empty space and matter; for fog it lies between them.

    Args:
        model: The model.
        step: Seed of the points; torch's global generator is not used.

    Returns:
        (M,) float32 on the field's device; per world unit, at least ``log10(MIN_DENSITY)``. Empty if no cell is
        occupied.
    """
    occupancy, warp = model.occupancy, model.warp
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
    if warp is not None:
        points = warp.to_world(points)[0]
    with model.autocast():
        return occupied_density(model.field, occupancy, points).float().clamp(min=MIN_DENSITY).log10()


def is_empty(model: Model) -> bool:
    """Returns whether a field is empty.

    It is if no cell is occupied, or if the density at random points of occupied cells is at most ``MIN_DENSITY``. A
    field with densities that are not finite does not count as empty.

    Args:
        model: The model.
    """
    return bool((log_densities(model, 0) <= math.log10(MIN_DENSITY)).all())
