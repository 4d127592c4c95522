"""Grids from coarse to fine whose sum is density and SH colour coefficients, no network: ``model=sh``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from voxelfield.config import NotNegative, Positive, Resolution
from voxelfield.fields.decoders import SHDecoder
from voxelfield.fields.density import DensityActivation
from voxelfield.fields.field import RadianceField
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.models.dense import SoftplusDensityConfig
from voxelfield.models.model_config import Degree, ModelConfig
from voxelfield.models.pyramid import built_levels, check_levels


@dataclass
class SHDensityConfig(SoftplusDensityConfig):
    """Softplus density with defaults for a sum of grids."""

    scale: Positive = 2.0e5
    initial: Positive = 1.0


@dataclass
class SHConfig(ModelConfig):
    """Density and spherical-harmonics colour without a network: the sum of grids from coarse to fine.

    Attributes:
        kind: Identifies this model.
        resolutions: Resolutions of the levels, each a whole multiple of the previous one. Levels finer than all
            ``trainer.stages`` are left out.
        view_resolution: Resolution up to which levels have coefficients of the harmonics that depend on the direction.
            Finer ones, except the coarsest of all, store only density and constant colour, which at degree 2 is a
            seventh of the memory. Null means that all levels have them.
        degree: Degree of the spherical harmonics.
        init_range: Features of the coarsest level are initialised uniformly in [-init_range, init_range],
            features of the other levels at zero.
        density: Settings of the activation that maps the first channel to density.
    """

    kind: Literal["sh"] = "sh"
    resolutions: list[Resolution] = field(default_factory=lambda: [25, 50, 100, 200, 400])
    view_resolution: Resolution | None = 200
    degree: Degree = 2
    init_range: NotNegative = 5e-5
    density: SHDensityConfig = field(default_factory=SHDensityConfig)

    def check_resolution(self, finest: int, name: str) -> None:
        """See :class:`ModelConfig`."""
        check_levels(self.resolutions, finest, name, reduce="sum")

    def build(self, aabb: Tensor, resolutions: Sequence[int], device: torch.device | str) -> RadianceField:
        """See :class:`ModelConfig`."""
        decoder = SHDecoder(self.degree, DensityActivation(self.density.scale, self.density.initial))
        levels = built_levels(self.resolutions, resolutions)
        finest_view = levels[-1] if self.view_resolution is None else max(self.view_resolution, levels[0])
        diffuse = sorted({*range(decoder.channels)}.difference(decoder.view_channels))
        pyramid = VoxelPyramid(
            levels,
            decoder.channels,
            aabb,
            reduce="sum",
            init_range=[self.init_range] + [0.0] * (len(levels) - 1),
            level_channels=[None if level <= finest_view else diffuse for level in levels],
            device=device,
        )
        return RadianceField(pyramid, decoder).to(device)
