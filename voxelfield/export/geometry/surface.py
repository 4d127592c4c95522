"""Surfaces as functions of position: the interface for marching cubes, refinement and normals."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.export.geometry.lattice import Lattice
from voxelfield.export.geometry.occupied import OccupiedVertices
from voxelfield.fields.field import Field
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.occupied_density import occupied_density

# Densities this many times e below or above the level are as good as none or infinite.
_REACH = 8.0


class Surface(Protocol):
    """Where a function of position changes its sign.

    Attributes:
        elsewhere: What the function is outside of :meth:`vertices`: below 0 where space is empty, NaN where nothing is
            known. No surface ends at what is not known.
    """

    elsewhere: float

    def __call__(self, points: Tensor) -> Tensor:
        """Maps world positions (M, 3) to values (M,), above 0 inside and below 0 outside; NaN where not known."""
        ...

    def vertices(self, lattice: Lattice, chunk: int) -> OccupiedVertices:
        """Returns which points of a lattice need to be evaluated; ``chunk`` of them at once, to bound memory."""
        ...


class DensitySurface:
    """Where the density that rendering sees crosses a level.

    Values are logarithms of the density's ratio to the level, because a density may grow a thousandfold within a voxel.

    Args:
        field: The field.
        occupancy: Where rays are sampled, on the field's device; elsewhere space is empty.
        level: Density at the surface, per world unit.
    """

    elsewhere = -_REACH

    def __init__(self, field: Field, occupancy: OccupancyGrid, level: float) -> None:
        self._field, self._occupancy, self._level = field, occupancy, level

    def __call__(self, points: Tensor) -> Tensor:
        """See :class:`Surface`."""
        ratio = occupied_density(self._field, self._occupancy, points) / self._level
        return ratio.log().clamp(-_REACH, _REACH)

    def vertices(self, lattice: Lattice, chunk: int) -> OccupiedVertices:
        """See :class:`Surface`."""
        return OccupiedVertices(self._field, self._occupancy, lattice, chunk)


def half_absorbing_density(length: float) -> float:
    """Returns the density, per world unit, at which a given length, in world units, absorbs half of the light."""
    return math.log(2) / length


def surface_normals(surface: Surface, points: Tensor, step: float, chunk: int) -> Tensor:
    """Returns the directions in which a surface's function falls the fastest, from its central differences.

    Args:
        surface: The surface.
        points: (M, 3) world positions on it.
        step: Distance over which differences are taken, world units.
        chunk: Evaluations at once, to bound memory.

    Returns:
        (M, 3) unit vectors; zero where the function is constant or not known.
    """
    offsets = torch.eye(3, device=points.device) * (step / 2)
    found = []
    for part in points.split(max(chunk // 6, 1)):
        ends = torch.stack([part + sign * offset for offset in offsets for sign in (1, -1)])
        values = surface(ends.view(-1, 3)).view(3, 2, -1)
        found.append(F.normalize((values[:, 1] - values[:, 0]).nan_to_num(0.0), dim=0).T)
    return torch.cat(found) if found else points.new_zeros(0, 3)
