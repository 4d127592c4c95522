"""What stands in for the grid of a field that has none, so that training need not ask."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from voxelfield.grids.boxes import box_extent, parse_box
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.voxel_grid import VoxelGrid, cubic_voxels


def grid_of(field: object) -> VoxelGrid | VoxelPyramid | None:
    """Returns the grid of a field, its attribute ``grid``, which a field need not have."""
    found: VoxelGrid | VoxelPyramid | None = getattr(field, "grid", None)
    return found


class Gridless:
    """A box that is divided into cubic cells, without vertices, features or parameters.

    The resolution of the trainer's stages then defines the distance between samples alone.

    Args:
        aabb: (2, 3) the box, world units or those of the field's frame.
        resolution: Cube root of the number of cells.

    Attributes:
        aabb: (2, 3) the box, on the device of the given one.
        levels: Empty.
        active: 0.
        channels: 0.
    """

    def __init__(self, aabb: Tensor, resolution: int) -> None:
        self.aabb = aabb
        self.levels: list[nn.Parameter] = []
        self.active = 0
        self.channels = 0
        self._resolution = resolution

    @property
    def resolution(self) -> tuple[int, int, int]:
        """Number of cells along each axis."""
        x, y, z = cubic_voxels(self.aabb, self._resolution)
        return x, y, z

    @property
    def voxel_size(self) -> Tensor:
        """Size (3,) of a cell."""
        extent = torch.tensor(box_extent(parse_box(self.aabb)), device=self.aabb.device)
        return extent / torch.tensor(self.resolution, device=self.aabb.device)

    def resize(self, resolution: int) -> None:
        """Divides the box into another number of cells."""
        self._resolution = resolution

    def modules(self) -> Iterator[nn.Module]:
        """Returns no modules."""
        return iter(())

    def enable_copies(self, dtype: torch.dtype) -> list[Tensor]:
        """Returns no copies."""
        return []

    def refresh_copies(self) -> None:
        """Does nothing."""

    def to(self, dtype: torch.dtype) -> None:
        """Does nothing."""
