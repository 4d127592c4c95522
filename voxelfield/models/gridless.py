"""A stand-in for the grid of a field that has none, so that training need not ask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from voxelfield.grids.boxes import box_extent, parse_box
from voxelfield.grids.voxel_grid import cubic_voxels


class Gridless(nn.Module):
    """A box that is divided into cubic cells, without vertices, features or parameters.

    The resolution of the trainer's stages then defines the distance between samples alone.

    Args:
        aabb: (2, 3) the box, in world units or in the field's warped coordinates.
        resolution: Cube root of the number of cells.

    Attributes:
        aabb: (2, 3) the box, on the device of the given one.
        levels: Empty.
        active: 0.
        channels: 0.
        working_copies: None.
    """

    levels: Sequence[nn.Parameter] = ()
    active = 0
    channels = 0
    working_copies = None

    def __init__(self, aabb: Tensor, resolution: int) -> None:
        super().__init__()
        self.aabb = aabb
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

    def resize(self, resolution: int, optimizer: object = None, *, aabb: object = None) -> None:
        """Does nothing: :attr:`voxelfield.Model.resolution` applies."""

    def enable_copies(self, dtype: torch.dtype, *, allocate_gradients: bool = True) -> list[Tensor]:
        """Returns no copies."""
        return []

    def refresh_copies(self) -> None:
        """Does nothing."""
