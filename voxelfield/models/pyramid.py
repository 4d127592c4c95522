"""Grids from coarse to fine, concatenated and read by two shallow networks: ``model=pyramid``, the default."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor, nn

from voxelfield.config import Count, NotNegative, Positive, Range, Resolution
from voxelfield.fields.decoders import DeferredMLPDecoder, FusedMLPDecoder, check_deferred_geometry
from voxelfield.fields.density import ExponentialDensity
from voxelfield.fields.field import RadianceField
from voxelfield.grids.pyramid import VoxelPyramid, check_resolutions
from voxelfield.grids.sparse_grid import BLOCK_VERTICES
from voxelfield.models.model import Model
from voxelfield.models.model_config import Degree, ModelConfig
from voxelfield.models.settings import Sampling
from voxelfield.ops._grids import Reduction
from voxelfield.rendering.occupancy import OccupancyGrid

logger = logging.getLogger(__name__)

# Limits of the compiled ops, repeated here because a configuration is checked before these are loaded.
MAX_WIDTH = 128
MAX_LAYERS = 16
MAX_LEVELS = 16

FusedWidth: TypeAlias = Annotated[int, Range(1, MAX_WIDTH)]


@dataclass
class ExponentialDensityConfig:
    """Exponential density; see :class:`voxelfield.fields.density.ExponentialDensity`.

    Attributes:
        initial: Density at a network output of 0, per ``scene.unit``.
    """

    initial: Positive = 1.0


@dataclass
class PyramidConfig(ModelConfig):
    """Grids from coarse to fine, concatenated; two shallow networks map their features to density and colour.

    Attributes:
        kind: Identifies this model.
        environment: As for every model, but chosen by the photographs.
        resolutions: Resolutions of the dense levels. Levels finer than all ``trainer.stages`` are left out; duplicates
            count once.
        sparse_resolutions: Resolutions of additional, finer levels. Once a stage of ``trainer.stages`` reaches such a
            level, it gets blocks only where training images show something. Levels finer than all stages are left out.
        max_blocks: Largest number of blocks of the finest sparse level; a block has 512 vertices. Coarser ones get
            fewer, in proportion to the square of the resolution.
        roulette: In training, samples of a smaller compositing weight are kept at random, in proportion to it, and
            count for more (:class:`voxelfield.RenderSettings`). All are kept where no kernel marches the field: with
            more than eight levels, channels other than 4, more than 16 numbers of ``geometry``, or on CUDA in float32.
        channels: Number of features per vertex of each level.
        init_range: Features of the coarsest level are initialised uniformly in [-init_range, init_range], to give the
            networks a varying input. Those of the other levels start at zero: if initial features vary from vertex to
            vertex, neighbours learn different codes for the same content.
        width: Width of the hidden layers of both networks.
        shading: Where the colour network is evaluated: ``per_sample``, or ``deferred``, once per ray, with the means of
            its samples' values (:class:`voxelfield.fields.decoders.DeferredMLPDecoder`).
        geometry: Number of outputs of the density network, all of which are inputs of the colour network. With
            ``shading=deferred`` they are raw density, diffuse colour (3) and features, and the density is no input.
        hidden: Number of hidden layers of the colour network.
        view_degree: Degree of the spherical harmonics that encode the viewing direction.
        density: Settings of the activation that maps the density network's first output to density.
    """

    kind: Literal["pyramid"] = "pyramid"
    environment: Literal["none", "map", "auto"] = "auto"
    resolutions: list[Resolution] = field(default_factory=lambda: [16, 32, 64, 128, 256, 400])
    sparse_resolutions: list[Resolution] = field(default_factory=list)
    max_blocks: Count = 163840
    roulette: Annotated[float, Range(0, 1)] = 0.0
    channels: FusedWidth = 4
    init_range: NotNegative = 5e-5
    width: FusedWidth = 128
    shading: Literal["per_sample", "deferred"] = "per_sample"
    geometry: FusedWidth = 16
    hidden: Annotated[int, Range(1, MAX_LAYERS - 1)] = 3
    view_degree: Degree = 3
    density: ExponentialDensityConfig = field(default_factory=ExponentialDensityConfig)

    def check(self, name: str) -> None:
        """Raises ValueError if settings contradict each other."""
        harmonics = (self.view_degree + 1) ** 2
        if self.geometry + harmonics > MAX_WIDTH:
            raise ValueError(
                f"{name}.geometry must be at most {MAX_WIDTH - harmonics} with {name}.view_degree={self.view_degree}, "
                f"got {self.geometry}"
            )
        if self.shading == "deferred":
            check_deferred_geometry(f"{name}.geometry", self.geometry)

    def check_resolution(self, finest: int, name: str) -> None:
        """See :class:`ModelConfig`."""
        levels = check_levels(self.resolutions, finest, name, self.sparse_levels(finest))
        if levels * self.channels > MAX_WIDTH:
            raise ValueError(
                f"{name}.channels must be at most {MAX_WIDTH // levels} with {levels} levels, got {self.channels}"
            )

    def build(self, aabb: Tensor, resolutions: Sequence[int], device: torch.device | str) -> RadianceField:
        """See :class:`ModelConfig`."""
        levels = built_levels(self.resolutions, resolutions)
        pyramid = VoxelPyramid(
            levels,
            self.channels,
            aabb,
            init_range=[self.init_range] + [0.0] * (len(levels) - 1),
            sparse_resolutions=self.sparse_levels(max(resolutions)),
            device=device,
        )
        density = ExponentialDensity(self.density.initial)
        kind = DeferredMLPDecoder if self.shading == "deferred" else FusedMLPDecoder
        decoder = kind(pyramid.channels, self.width, self.geometry, self.hidden, self.view_degree, density)
        return RadianceField(pyramid, decoder).to(device)

    def build_model(self, field: RadianceField, occupancy: OccupancyGrid, sampling: Sampling) -> PyramidModel:
        """See :class:`ModelConfig`."""
        return PyramidModel(field, occupancy, sampling, self)

    def sparse_levels(self, finest: int) -> list[int]:
        """Returns the sparse levels up to a resolution."""
        return [level for level in self.sparse_resolutions if level <= finest]


class PyramidModel(Model):
    """A model of a pyramid, whose sparse levels get blocks during training; ``config`` has built the field."""

    def __init__(
        self, field: RadianceField, occupancy: OccupancyGrid, sampling: Sampling, config: PyramidConfig
    ) -> None:
        super().__init__(field, occupancy, sampling)
        self.config, self.roulette = config, config.roulette

    @property
    def grid(self) -> VoxelPyramid:
        """See :class:`Model`."""
        grid = super().grid
        assert isinstance(grid, VoxelPyramid)
        return grid

    def resized(self, resolution: int, box: Tensor | None) -> Sequence[nn.Parameter]:
        """Only a new box changes the dense levels, which have the resolutions of all stages from the beginning."""
        if box is not None:
            return self.grid.levels
        return [grid.features for grid in self.grid.sparse_grids[: len(self.config.sparse_levels(resolution))]]

    def add_detail(self, resolution: int) -> None:
        """Allocates blocks of the sparse levels."""
        grid, limit = self.grid, self.config.max_blocks
        levels = self.config.sparse_levels(resolution)
        if not levels:
            return
        # Cells have the size of the finest blocks, so that no such block is allocated for content of its neighbour.
        cells = self.count_shown(grid.sparse_grids[len(levels) - 1].exists.shape)
        wanted = grid.allocate(resolution, cells, self.occupancy.aabb, self.setup.optimizer.grid, max_blocks=limit)
        limits = grid.block_limits(limit)
        for level, count in wanted.items():
            logger.info("level %d: %d blocks", level, min(count, limits[level]))
            if count > limits[level]:
                logger.warning(
                    "level %d would have %d blocks: detail is left out beyond %d; raise model.max_blocks from %d",
                    *(level, count, limits[level], limit),
                )

    def count_features(self, finest: int) -> int:
        """Returns the number of grid elements; sparse levels count with the largest number of blocks they may have."""
        return sum(level.features.numel() for level in self.grid.grids) + self.count_sparse_features()

    def count_sparse_features(self) -> int:
        """Returns the number of elements of the largest number of blocks that the sparse levels may have."""
        blocks = sum(self.grid.block_limits(self.config.max_blocks).values())
        return blocks * BLOCK_VERTICES**3 * self.config.channels


def built_levels(resolutions: Sequence[int], stages: Sequence[int]) -> list[int]:
    """Returns the levels that training's stages reach, at least the first, and logs a warning about those left out.

    Duplicates are allowed: the trainer's finest resolution may coincide with one of the model's levels.
    """
    finest = max(stages)
    used = _used_levels(resolutions, finest)
    left_out = [level for level in dict.fromkeys(resolutions) if level not in used]
    if left_out:
        logger.warning(
            "levels %s of model.resolutions are finer than all trainer.stages (%d): left out", left_out, finest
        )
    return used


def check_levels(
    resolutions: Sequence[int], finest: int, name: str, sparse: Sequence[int] = (), reduce: Reduction = "concat"
) -> int:
    """Returns the number of levels up to a resolution, at least the first.

    Raises ValueError, beginning with the model's ``name``, if a :class:`voxelfield.VoxelPyramid` cannot have them.
    """
    used = _used_levels(resolutions, finest)
    check_resolutions(used, sparse, reduce, f"{name}.")
    if len(used) > MAX_LEVELS:
        raise ValueError(f"{name}.resolutions must be at most {MAX_LEVELS} levels, got {list(resolutions)}")
    return len(used) + len(sparse)


def _used_levels(resolutions: Sequence[int], finest: int) -> list[int]:
    return list(dict.fromkeys(level for level in resolutions if level <= finest)) or list(resolutions[:1])
