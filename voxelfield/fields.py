"""A radiance field: voxels and the decoder that reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from voxelfield.decoders import ExponentialDensity, MLPDecoder, NetworkDecoder, SHDecoder
from voxelfield.grids import VoxelGrid
from voxelfield.ops.march_visible import LEVEL_CHANNELS, MAX_GEOMETRY, MAX_LEVELS, MAX_NUMBERS
from voxelfield.pyramid import VoxelPyramid
from voxelfield.rays import RaySamples


@dataclass(frozen=True, eq=False)
class PyramidDensity:
    """The density of a pyramid with a network behind it, as :func:`voxelfield.ops.march_visible` takes it.

    Attributes:
        levels: What the active levels are read from, each (X_l, Y_l, Z_l, 4).
        aabb: (2, 3) their box, world units.
        weights: The density network's two matrices.
        initial: Density of a zero output, per world unit.
    """

    levels: list[Tensor]
    aabb: Tensor
    weights: list[Tensor]
    initial: float


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

        That holds for a single grid and a density that is a monotonic function of one interpolated channel.
        """
        if isinstance(self.grid, VoxelPyramid) or isinstance(self.decoder, NetworkDecoder):
            return None
        return self.decoder.density(self.grid.features)

    def pyramid_density(self) -> PyramidDensity | None:
        """Returns the density as one kernel can march through it, or None if the field is of another kind.

        It can where the grid is a pyramid of 4 channels and less than 2^31 numbers a level side by side, in float16 on
        CUDA (see :meth:`VoxelPyramid.fuse`), and the decoder a network of at most 16 geometry outputs with an
        exponential density.
        """
        grid, decoder = self.grid, self.decoder
        if not isinstance(grid, VoxelPyramid) or not isinstance(decoder, NetworkDecoder):
            return None
        weights = list(decoder.density_network)
        if (
            not isinstance(decoder.activation, ExponentialDensity)
            or any(level.channels != LEVEL_CHANNELS for level in grid.grids)
            or any(level.numel() >= MAX_NUMBERS for level in grid.levels)
            or grid.reduce != "concat"
            or grid.active > MAX_LEVELS
            or weights[-1].shape[0] > MAX_GEOMETRY
        ):
            return None
        levels = grid.read_from
        if levels[0].is_cuda and levels[0].dtype != torch.float16:
            return None
        # Levels that are off read zero: their columns of the first matrix do nothing.
        first = weights[0][:, : LEVEL_CHANNELS * len(levels)]
        return PyramidDensity(levels, grid.aabb, [first, *weights[1:]], decoder.activation.initial)
