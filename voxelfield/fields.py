"""A radiance field: voxels and the decoder that reads them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from voxelfield.decoders import MLPDecoder, NetworkDecoder, SHDecoder
from voxelfield.grids import VoxelGrid
from voxelfield.pyramid import VoxelPyramid
from voxelfield.rays import RaySamples


class RadianceField(nn.Module):
    """Density and view-dependent colour everywhere in a box.

    Args:
        grid: Features.
        decoder: Reads them.

    Raises:
        ValueError: The decoder expects another number of channels.
    """

    def __init__(self, grid: VoxelGrid | VoxelPyramid, decoder: SHDecoder | MLPDecoder | NetworkDecoder) -> None:
        super().__init__()
        if grid.channels != decoder.channels:
            raise ValueError(f"grid has {grid.channels} channels, but the decoder reads {decoder.channels}")
        self.grid = grid
        self.decoder = decoder

    def forward(self, points: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluates the field.

        Args:
            points: (M, 3) world positions.
            directions: (M, 3) unit viewing directions, world frame.

        Returns:
            density (M,), per world unit, and rgb (M, 3) in [0, 1]; float32.
        """
        each = torch.arange(points.shape[0], device=points.device)
        density, rgb = self.decoder(self.grid(points), directions, each)
        return density, rgb

    def density(self, points: Tensor) -> Tensor:
        """Evaluates the density alone.

        Args:
            points: (M, 3) world positions.

        Returns:
            (M,), per world unit; float32.
        """
        return self.decoder.density(self.grid(points))

    def sample(self, samples: RaySamples, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluates the field at packed ray samples.

        Args:
            samples: M samples of R rays.
            directions: (R, 3) the rays' unit directions.

        Returns:
            density (M,), per world unit, and rgb (M, 3) in [0, 1]; float32.
        """
        density, rgb = self.decoder(self.grid(samples.positions), directions, samples.ray_index)
        return density, rgb

    def vertex_density(self) -> Tensor | None:
        """Returns the densities (X, Y, Z) at the grid's vertices if none is higher between them, otherwise None.

        That holds for a density that is a monotonic function of one interpolated channel.
        """
        if isinstance(self.grid, VoxelPyramid) or isinstance(self.decoder, NetworkDecoder):
            return None
        return self.decoder.density(self.grid.features)
