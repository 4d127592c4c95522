"""A radiance field: a voxel grid and the decoder that reads it."""

from __future__ import annotations

from torch import Tensor, nn

from voxelfield.decoders import MLPDecoder, SHDecoder
from voxelfield.grids import VoxelGrid
from voxelfield.rays import RaySamples


class RadianceField(nn.Module):
    """Density and view-dependent colour everywhere in a box.

    Args:
        grid: Features; channel 0 is raw density.
        decoder: Reads them.

    Raises:
        ValueError: The decoder expects another number of channels.
    """

    def __init__(self, grid: VoxelGrid, decoder: SHDecoder | MLPDecoder) -> None:
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
        features = self.grid(points)
        return self.decoder.density(features), self.decoder.rgb(features, self.decoder.encode_view(directions))

    def sample(self, samples: RaySamples, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluates the field at packed ray samples, encoding each ray's direction once.

        Args:
            samples: M samples of R rays.
            directions: (R, 3) the rays' unit directions.

        Returns:
            density (M,), per world unit, and rgb (M, 3) in [0, 1]; float32.
        """
        features = self.grid(samples.positions)
        view = self.decoder.encode_view(directions)[samples.ray_index]
        return self.decoder.density(features), self.decoder.rgb(features, view)

    def vertex_density(self) -> Tensor:
        """Returns the densities (X, Y, Z) at the grid's vertices."""
        return self.decoder.density(self.grid.features)
