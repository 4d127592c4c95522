"""Radiance fields: what rendering needs of one, and the one of this package, voxels and a decoder that reads them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from voxelfield.fields.decoders import Decoder
from voxelfield.fields.pyramid_density import PyramidDensity, is_pyramid_density, read_pyramid_density
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.voxel_grid import VoxelGrid
from voxelfield.ops import PackedSamples


class Field(Protocol):
    """What rendering needs of a field; need not be an ``nn.Module``.

    Nothing more is assumed of a field, so it takes the general path: candidate samples are placed in occupied cells,
    :meth:`density` tells which of them show, and :meth:`sample` evaluates these.

    A field may have two members more:

    - ``pyramid_density``, a method like that of :class:`RadianceField`: one kernel marches through its result instead.
    - ``skips_nan``, a bool: whether positions that are NaN have no influence on its gradients. The unused rows of
      samples with a fixed capacity (:class:`voxelfield.rendering.march.Capacity`) then have such positions, at which
      grids access no memory. Without it, or where it is False, unused rows have positions in the occupancy grid's
      box: the gradient that they receive is zero, but a network that reads NaN would turn that into NaN.
    """

    @property
    def aabb(self) -> Tensor:
        """The box (2, 3) outside of which cameras see nothing, float32, world units, on the field's device."""
        ...

    def density(self, points: Tensor) -> Tensor:
        """Maps world positions (M, 3) to densities (M,), per world unit; float32."""
        ...

    def sample(self, samples: PackedSamples, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluates the field at packed ray samples.

        Args:
            samples: M samples of R rays.
            directions: (R, 3) the rays' unit directions.

        Returns:
            density (M,), per world unit, and rgb (M, 3); float32.
        """
        ...


class RadianceField(nn.Module):
    """Density and view-dependent colour everywhere in a box.

    Args:
        grid: Features.
        decoder: Reads them; one of this package's or any other :class:`voxelfield.fields.decoders.Decoder`.

    Raises:
        ValueError: The decoder expects another number of channels.
    """

    def __init__(self, grid: VoxelGrid | VoxelPyramid, decoder: Decoder) -> None:
        super().__init__()
        if grid.channels != decoder.channels:
            raise ValueError(f"decoder.channels must be {grid.channels}, as the grid has, got {decoder.channels}")
        self.grid = grid
        self.decoder = decoder

    @property
    def skips_nan(self) -> bool:
        """See :class:`Field`: a grid reads zeros at such positions, and receives no gradient."""
        return True

    @property
    def aabb(self) -> Tensor:
        """The grid's box (2, 3), world units."""
        return self.grid.aabb

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

    def sample(self, samples: PackedSamples, directions: Tensor) -> tuple[Tensor, Tensor]:
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

        That holds for a single grid and a decoder that says so (``density_is_monotonic``).
        """
        levels = self.grid.levels
        if len(levels) > 1 or not getattr(self.decoder, "density_is_monotonic", False):
            return None
        features = levels[0]
        return self.decoder.density(features.flatten(0, 2)).view(features.shape[:-1])

    @property
    def has_pyramid_density(self) -> bool:
        """Whether the density is of a kind that one kernel can march through (:func:`is_pyramid_density`).

        Not for subclasses, which may compute something else.
        """
        return type(self) is RadianceField and is_pyramid_density(self.grid, self.decoder)

    def pyramid_density(self) -> PyramidDensity | None:
        """Returns the density as one kernel can march through it.

        None where it is of another kind (:attr:`has_pyramid_density`) or, on CUDA, read from other than float16 copies
        (:meth:`VoxelPyramid.keep_copies`).
        """
        return read_pyramid_density(self.grid, self.decoder) if self.has_pyramid_density else None
