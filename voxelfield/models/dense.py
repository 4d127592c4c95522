"""A single grid of density and features, with a shallow network for colour: ``model=dense``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from voxelfield.config import Count, NotNegative, Positive
from voxelfield.fields.decoders import ColorMLPDecoder
from voxelfield.fields.density import DensityActivation
from voxelfield.fields.field import RadianceField
from voxelfield.grids.voxel_grid import VoxelGrid, cubic_voxels
from voxelfield.models.model import Model
from voxelfield.models.model_config import Degree, ModelConfig
from voxelfield.models.settings import Sampling
from voxelfield.rendering.occupancy import OccupancyGrid


class DenseModel(Model):
    """A model of a single grid, which is resized up to the finest resolution."""

    def count_features(self, finest: int) -> int:
        """Returns the number of grid elements at the finest resolution of training."""
        return finest**3 * self.grid.channels


@dataclass
class SoftplusDensityConfig:
    """Softplus density, with defaults for a single grid; see :class:`voxelfield.fields.density.DensityActivation`.

    Attributes:
        scale: Density per unit of raw value in the linear part of the activation, per ``scene.unit``.
        initial: Density at a raw value of 0, per ``scene.unit``.
    """

    scale: Positive = 200.0
    initial: Positive = 0.1


@dataclass
class DenseConfig(ModelConfig):
    """A single grid of density and features, with a shallow network for colour.

    Attributes:
        kind: Identifies this model.
        features: Number of features per vertex, in addition to the density.
        width: Width of the hidden layers.
        hidden: Number of hidden layers.
        view_degree: Degree of the spherical harmonics that encode the viewing direction.
        init_std: Standard deviation of the initial features.
        density: Settings of the activation that maps the first channel to density.
    """

    kind: Literal["dense"] = "dense"
    features: Count = 11
    width: Count = 64
    hidden: Count = 2
    view_degree: Degree = 3
    init_std: NotNegative = 0.1
    density: SoftplusDensityConfig = field(default_factory=SoftplusDensityConfig)

    def build(self, aabb: Tensor, resolutions: Sequence[int], device: torch.device | str) -> RadianceField:
        """See :class:`ModelConfig`. The grid has the first stage's resolution."""
        density = DensityActivation(self.density.scale, self.density.initial)
        decoder = ColorMLPDecoder(self.features, self.width, self.hidden, self.view_degree, density)
        vertices = cubic_voxels(aabb, resolutions[0])
        grid = VoxelGrid(vertices, decoder.channels, aabb, init_std=self.init_std, device=device)
        with torch.no_grad():
            grid.features[..., 0] = 0  # a uniform density: initial noise would be mistaken for matter
        return RadianceField(grid, decoder).to(device)

    def build_model(self, field: RadianceField, occupancy: OccupancyGrid, sampling: Sampling) -> DenseModel:
        """See :class:`ModelConfig`."""
        return DenseModel(field, occupancy, sampling)
