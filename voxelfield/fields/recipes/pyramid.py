"""Grids from coarse to fine, read side by side by two shallow networks: ``model=pyramid``, the default."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from voxelfield.config.parsing import Range
from voxelfield.config.types import Count, NotNegative, Positive, Resolution
from voxelfield.fields.decoders import FusedMLPDecoder
from voxelfield.fields.density import ExponentialDensity
from voxelfield.fields.field import RadianceField
from voxelfield.fields.recipes.levels import (
    MAX_LAYERS,
    MAX_WIDTH,
    Degree,
    FusedWidth,
    built_levels,
    check_levels,
    initial_ranges,
)
from voxelfield.fields.recipes.recipe import Recipe
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.sparse_grid import BLOCK_VERTICES
from voxelfield.rendering.backends.backend import ImageBackend
from voxelfield.rendering.backends.pyramid_images import PyramidImages

logger = logging.getLogger(__name__)


@dataclass
class ExponentialDensityConfig:
    """Exponential density; see :class:`voxelfield.fields.density.ExponentialDensity`.

    Attributes:
        initial: Density where the network says 0, per world unit.
    """

    initial: Positive = 1.0


@dataclass
class PyramidRecipe(Recipe):
    """Grids from coarse to fine, read side by side; two shallow networks make density and colour of them.

    Attributes:
        kind: Tells this model from the others.
        resolutions: Of the levels. Those finer than all ``trainer.stages`` are left out, and one that is named twice
            counts once.
        sparse_resolutions: Of further, finer levels, of which only blocks are there that training images show once a
            stage of ``trainer.stages`` reaches them. Levels finer than all stages are left out.
        most_blocks: Largest number of blocks of 512 vertices of each of these.
        channels: Features of a level at a vertex.
        init_range: Features of the coarsest level start uniformly within this of zero, which gives the networks
            something to begin with. Those of the others start at zero: where initial features vary from vertex to
            vertex, neighbours learn different codes for the same thing.
        width: Of both networks' hidden layers.
        geometry: Numbers that the density network hands to the colour network.
        hidden: Hidden layers of the colour network.
        view_degree: Of the harmonics that tell the colour network the viewing direction.
        density: How density comes of the density network.
    """

    image_backends: ClassVar[tuple[type[ImageBackend], ...]] = (PyramidImages,)

    kind: Literal["pyramid"] = "pyramid"
    resolutions: list[Resolution] = field(default_factory=lambda: [16, 32, 64, 128, 256, 400])
    sparse_resolutions: list[Resolution] = field(default_factory=list)
    most_blocks: Count = 163840
    channels: FusedWidth = 4
    init_range: NotNegative = 5e-5
    width: FusedWidth = 128
    geometry: FusedWidth = 16
    hidden: Annotated[int, Range(1, MAX_LAYERS - 1)] = 3
    view_degree: Degree = 3
    density: ExponentialDensityConfig = field(default_factory=ExponentialDensityConfig)

    def check(self, name: str) -> None:
        """Raises ValueError where settings do not fit one another."""
        harmonics = (self.view_degree + 1) ** 2
        if self.geometry + harmonics > MAX_WIDTH:
            raise ValueError(
                f"{name}.geometry must be at most {MAX_WIDTH - harmonics} with {name}.view_degree={self.view_degree}, "
                f"got {self.geometry}"
            )

    def check_resolution(self, finest: int, name: str) -> None:
        """See :class:`Recipe`."""
        dense = check_levels(self.resolutions, finest, name)
        sparse = self._sparse_levels(finest)
        if sparse != sorted(set(sparse)) or any(level <= dense[-1] for level in sparse):
            raise ValueError(
                f"{name}.sparse_resolutions must rise from above the finest of {name}.resolutions, {dense[-1]}, got "
                f"{self.sparse_resolutions}"
            )
        levels = len(dense) + len(sparse)
        if levels * self.channels > MAX_WIDTH:
            raise ValueError(
                f"{name}.channels must be at most {MAX_WIDTH // levels} with {levels} levels, got {self.channels}"
            )

    def build(self, aabb: Tensor, resolutions: Sequence[int], device: torch.device | str) -> RadianceField:
        """See :class:`Recipe`."""
        levels = built_levels(self.resolutions, resolutions)
        pyramid = VoxelPyramid(
            levels,
            self.channels,
            aabb,
            init_range=initial_ranges(self.init_range, levels),
            sparse_resolutions=self._sparse_levels(max(resolutions)),
            device=device,
        )
        density = ExponentialDensity(self.density.initial)
        decoder = FusedMLPDecoder(pyramid.channels, self.width, self.geometry, self.hidden, self.view_degree, density)
        return RadianceField(pyramid, decoder).to(device)

    def add_detail(
        self,
        field: RadianceField,
        resolution: int,
        shown: Callable[[Sequence[int]], Tensor],
        aabb: Tensor,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """See :class:`Recipe`: blocks of the sparse levels."""
        assert isinstance(field.grid, VoxelPyramid)
        levels = self._sparse_levels(resolution)
        if not levels:
            return
        # Half as large as the finest blocks: what a cell touches is not far from what it shows.
        finest = field.grid.sparse_grids[len(levels) - 1]
        cells = shown([2 * blocks for blocks in finest.exists.shape])
        wanted = field.grid.allocate(resolution, cells, aabb, optimizer, most=self.most_blocks)
        for level, count in wanted.items():
            logger.info("level %d: %d blocks", level, min(count, self.most_blocks))
            if count > self.most_blocks:
                logger.warning(
                    "level %d would have %d blocks: detail is left out beyond model.most_blocks=%d",
                    *(level, count, self.most_blocks),
                )

    def count_features(self, field: RadianceField, finest: int) -> int:
        """See :class:`Recipe`: of sparse levels, as many as they may have."""
        assert isinstance(field.grid, VoxelPyramid)
        dense = sum(grid.features.numel() for grid in field.grid.grids)
        return dense + len(self._sparse_levels(finest)) * self.most_blocks * BLOCK_VERTICES**3 * self.channels

    def _sparse_levels(self, finest: int) -> list[int]:
        return [level for level in self.sparse_resolutions if level <= finest]
