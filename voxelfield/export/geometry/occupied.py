"""Which points of a lattice lie in occupied cells, slab by slab."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.export.geometry.lattice import Lattice
from voxelfield.fields.field import Field, warp_of
from voxelfield.grids.boxes import cell_indices
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.occupied_density import occupied_points


def widened(occupancy: OccupancyGrid) -> OccupancyGrid:
    """Returns a copy of an occupancy grid in which the neighbours of occupied cells are occupied too."""
    wide = OccupancyGrid(tuple(occupancy.occupied.shape), occupancy.aabb).to(occupancy.aabb.device)
    spread = F.max_pool3d(occupancy.occupied[None].float(), 3, stride=1, padding=1)[0] > 0
    wide.occupied.copy_(spread)
    return wide


class OccupiedVertices:
    """Tells which points of a lattice lie in occupied cells.

    Args:
        field: The field, whose warp is that of the cells.
        occupancy: The cells.
        lattice: The points.
        chunk: Points at once, to bound memory; only for a warp other than the world's.
    """

    def __init__(self, field: Field, occupancy: OccupancyGrid, lattice: Lattice, chunk: int) -> None:
        self._field, self._occupancy, self._lattice, self._chunk = field, occupancy, lattice, chunk
        self._device = occupancy.aabb.device
        # In the world frame, the cell that a point lies in is found for each axis by itself.
        self._cells: list[Tensor] = []
        self._inside: list[Tensor] = []
        if warp_of(field) is not None:
            return
        low, high = occupancy.aabb.unbind()
        for axis, cells in enumerate(occupancy.occupied.shape):
            unit = (lattice.axis(axis, self._device) - low[axis]) / (high[axis] - low[axis])
            self._cells.append((unit * cells).long().clamp(0, cells - 1))
            self._inside.append((unit >= 0) & (unit <= 1))

    def layers(self, first: int, stop: int) -> Tensor:
        """Returns which points of some layers along x lie in occupied cells.

        Args:
            first: The first layer.
            stop: The one after the last layer.

        Returns:
            (stop - first, Y, Z) bool.
        """
        if not self._cells:
            return self._in_frame(first, stop)
        x, y, z = self._cells
        inside_x, inside_y, inside_z = self._inside
        rows = self._occupancy.occupied[x[first:stop]] & inside_x[first:stop, None, None]
        if not bool(rows.any()):
            shape = (stop - first, *self._lattice.shape[1:])
            return torch.zeros(shape, dtype=torch.bool, device=self._device)
        return rows[:, y][:, :, z] & (inside_y[:, None] & inside_z)

    def _in_frame(self, first: int, stop: int) -> Tensor:
        shape = (stop - first, *self._lattice.shape[1:])
        found = torch.zeros(shape, dtype=torch.bool, device=self._device)
        flat = found.view(-1)
        for start in range(0, flat.numel(), self._chunk):
            part = torch.arange(start, min(start + self._chunk, flat.numel()), device=self._device)
            points = self._lattice.positions(unravelled(part, first, self._lattice))
            flat[part] = occupied_points(self._field, self._occupancy, points)
        return found


def unravelled(flat: Tensor, first: int, lattice: Lattice) -> Tensor:
    """Returns the indices (M, 3) in a lattice of the points (M,) of its layers from ``first`` on, counted in order."""
    x, y, z = cell_indices(flat, lattice.shape)
    return torch.stack((x + first, y, z), dim=-1)
