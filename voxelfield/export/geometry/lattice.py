"""Regular lattices of points over a box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from voxelfield.grids.boxes import Box


@dataclass(frozen=True)
class Lattice:
    """Points at equal distances along each axis.

    Args:
        low: The first point, world units.
        spacing: Distances between neighbours along x, y and z, world units.
        shape: Numbers of points along x, y and z, each at least 2.
    """

    low: tuple[float, float, float]
    spacing: tuple[float, float, float]
    shape: tuple[int, int, int]

    @classmethod
    def over(cls, box: Box, spacing: Sequence[float]) -> Lattice:
        """Returns a lattice whose outermost points lie on the faces of a box.

        Args:
            box: Lower and upper corner, world units.
            spacing: Wanted distances along x, y and z, world units; changed a little so that they fit.
        """
        extent = [high - low for low, high in zip(*box, strict=True)]
        cells = [max(1, round(length / step)) for length, step in zip(extent, spacing, strict=True)]
        x, y, z = (length / count for length, count in zip(extent, cells, strict=True))
        low = box[0]
        return cls((low[0], low[1], low[2]), (x, y, z), (cells[0] + 1, cells[1] + 1, cells[2] + 1))

    def enlarged(self) -> Lattice:
        """Returns the lattice with one more point at both ends of each axis."""
        x, y, z = (low - step for low, step in zip(self.low, self.spacing, strict=True))
        return Lattice((x, y, z), self.spacing, (self.shape[0] + 2, self.shape[1] + 2, self.shape[2] + 2))

    def axis(self, axis: int, device: torch.device) -> Tensor:
        """Returns the coordinates (n,) of the points along an axis, float32."""
        index = torch.arange(self.shape[axis], dtype=torch.float64)
        return (self.low[axis] + self.spacing[axis] * index).float().to(device)

    def positions(self, index: Tensor) -> Tensor:
        """Returns the world positions (M, 3) of indices (M, 3) along x, y and z, float32; fractions lie in between.

        Computed in float64, so that a position does not depend on which part of the lattice it is computed with.
        """
        low = torch.tensor(self.low, dtype=torch.float64, device=index.device)
        spacing = torch.tensor(self.spacing, dtype=torch.float64, device=index.device)
        return (low + spacing * index.double()).float()
