"""The exported part of space as a lattice of points, which of them are occupied, and evaluation in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.config import Count
from voxelfield.export.registry import Option
from voxelfield.fields.field import grid_of
from voxelfield.foundation.checks import check_at_least_one
from voxelfield.grids.boxes import Box, box_extent, cell_indices, parse_box
from voxelfield.models.model import Model
from voxelfield.progress import tracked
from voxelfield.rendering.occupancy import occupied_points

SLAB = 16  # layers of cells that are extracted at once
CHUNK = 1 << 20  # points that are evaluated at once

RESOLUTION = Option("resolution", "cells along the longest edge (default: one per voxel)", Count, "N")
BOX = Option("box", "contents of the K-th nested box, at its voxel size (default: 1, the smallest)", Count, "K")


def in_chunks(function: Callable[..., Tensor], *rows: Tensor, evaluations: int = 1, doing: str = "") -> Tensor:
    """Applies a function to some of the rows (M, ...) at once, to bound memory, and joins its results.

    A row costs as much memory as ``evaluations`` of a field. The progress of what is named ``doing`` is displayed.
    """
    size = max(CHUNK // evaluations, 1)
    chunks = list(zip(*(each.split(size) for each in rows), strict=True))
    return torch.cat([function(*parts) for parts in tracked(chunks, doing, silent=not doing)])


def joined_channels(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Returns arrays (X, Y, Z) and (X, Y, Z, C) as one (X, Y, Z, C) float32; bytes become numbers in [0, 1]."""
    scaled = [each / np.float32(255) if each.dtype == np.uint8 else each for each in arrays]
    return np.concatenate([each.reshape(*each.shape[:3], -1).astype(np.float32) for each in scaled], axis=-1)


def check_finite_values(name: str, values: Tensor) -> None:
    """Raises FloatingPointError unless all values of a field are finite."""
    if not bool(values.isfinite().all()):
        raise FloatingPointError(
            f"{name} of the field must be finite, got NaN or infinity: the weights of the run are damaged, or its "
            "training diverged"
        )


@dataclass(frozen=True, eq=False)
class Lattice:
    """Points at equal distances along each axis.

    Args:
        low: (3,) the first point, world units, float64 on the CPU.
        spacing: (3,) distances between neighbours along x, y and z, world units, float64 on the CPU.
        shape: Numbers of points along x, y and z, each at least 2.
    """

    low: Tensor
    spacing: Tensor
    shape: tuple[int, ...]

    @classmethod
    def over(cls, box: Box, spacing: Sequence[float]) -> Lattice:
        """Returns a lattice whose outermost points lie on the faces of a box, with about the given ``spacing``."""
        low, high = torch.tensor(box, dtype=torch.float64)
        cells = ((high - low) / torch.tensor(spacing, dtype=torch.float64)).round().clamp(min=1)
        return cls(low, (high - low) / cells, tuple(int(count) + 1 for count in cells))

    def enlarged(self) -> Lattice:
        """Returns the lattice with one more point at both ends of each axis."""
        return Lattice(self.low - self.spacing, self.spacing, tuple(count + 2 for count in self.shape))

    def positions(self, index: Tensor) -> Tensor:
        """Returns the world positions (M, 3) of indices (M, 3) along x, y and z, float32; fractions lie in between.

        Computed in float64, so that a position does not depend on which part of the lattice it is computed with.
        """
        return (self.low.to(index.device) + self.spacing.to(index.device) * index.double()).float()

    def layer_positions(self, flat: Tensor, first: int) -> Tensor:
        """Returns the world positions (M, 3) of points (M,), counted in order of memory from layer ``first`` on."""
        x, y, z = cell_indices(flat, self.shape)
        return self.positions(torch.stack((x + first, y, z), dim=-1))


def warped_voxels(model: Model) -> list[float]:
    """Returns the edges of the voxels of a model's field along x, y and z, in warped coordinates.

    The voxels of a field without a grid are the cells of its occupancy grid.
    """
    grid, occupancy = grid_of(model.field), model.occupancy
    if grid is None:
        cells = torch.tensor(occupancy.occupied.shape, device=model.device)
        return (occupancy.aabb.diff(dim=0)[0] / cells).tolist()
    return grid.voxel_size.tolist()


def box_lattice(model: Model, number: int = 1, resolution: int | None = None) -> tuple[Lattice, float]:
    """Returns a lattice over a nested box of a model's field, and the shortest edge of a voxel there, world units.

    Args:
        model: The model.
        number: Number of the box; 1 is the smallest, and the only one of fields without nested boxes.
        resolution: Cells along the box's longest edge; None: about one for each voxel of the field's finest level.

    Raises:
        ValueError: There is no such box, or the resolution is below 1.
    """
    warp, voxels = model.warp, warped_voxels(model)
    count = 1 if warp is None else warp.count
    if not 1 <= number <= count:
        raise ValueError(f"box must be 1 to {count}, as many as the field has, got {number}")
    box = parse_box(model.field.aabb) if warp is None else warp.world_box(number)
    spacing = voxels if warp is None else warp.voxels_in_world(voxels, number)
    voxel = min(spacing)
    if resolution is not None:
        check_at_least_one("resolution", resolution)
        spacing = (max(box_extent(box)) / resolution,) * 3
    return Lattice.over(box, spacing), voxel


def occupied_layers(model: Model, lattice: Lattice) -> Callable[[int, int], Tensor]:
    """Returns a function that tells which points of a lattice lie in occupied cells of a model.

    It is called with the first of some layers along x and the one after the last, and returns (layers, Y, Z) bool.
    """
    occupancy = model.occupancy
    if model.warp is not None:

        def layers(first: int, stop: int) -> Tensor:
            def occupied(flat: Tensor) -> Tensor:
                return occupied_points(model.field, occupancy, lattice.layer_positions(flat, first))

            shape = (stop - first, *lattice.shape[1:])
            return in_chunks(occupied, torch.arange(math.prod(shape), device=model.device)).view(shape)

        return layers
    # Without a warp, the cell of a point is found for each axis separately. Points outside read an empty cell.
    padded, found = F.pad(occupancy.occupied, (0, 1) * 3), []
    for axis, (low, high, cells) in enumerate(zip(*occupancy.aabb.tolist(), occupancy.occupied.shape, strict=True)):
        index = torch.zeros(lattice.shape[axis], 3, device=model.device)
        index[:, axis] = torch.arange(lattice.shape[axis], device=model.device)
        unit = (lattice.positions(index)[:, axis] - low) / (high - low)
        inside = (unit >= 0) & (unit <= 1)
        found.append(torch.where(inside, (unit * cells).long().clamp(0, cells - 1), cells))
    x, y, z = found
    return lambda first, stop: padded[x[first:stop]][:, y][:, :, z]
