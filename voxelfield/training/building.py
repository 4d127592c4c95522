"""From a configuration to the field that is trained."""

from __future__ import annotations

import logging

import torch

from voxelfield.datasets.scene import Scene
from voxelfield.decoders import DensityActivation, ExponentialDensity, MLPDecoder, NetworkDecoder, SHDecoder
from voxelfield.fields import RadianceField
from voxelfield.grids import VoxelGrid, cubic_voxels
from voxelfield.pyramid import VoxelPyramid
from voxelfield.training.config import ModelConfig, PyramidModelConfig, SHModelConfig, TrainerConfig, used_levels

logger = logging.getLogger(__name__)


def build_field(
    model: ModelConfig, scene: Scene, trainer: TrainerConfig, device: torch.device | str = "cpu"
) -> RadianceField:
    """Builds the configured field; a single grid has the first stage's resolution."""
    if model.kind == "pyramid":
        pyramid = VoxelPyramid(
            _used_levels(model, trainer),
            model.channels,
            scene.aabb,
            init_range=model.init_range,
            device=device,
        )
        network = NetworkDecoder(
            pyramid.channels,
            model.width,
            model.geometry,
            model.hidden,
            model.view_degree,
            ExponentialDensity(model.density.initial),
        )
        return RadianceField(pyramid, network).to(device)
    if model.kind == "sh":
        harmonics = SHDecoder(model.degree, DensityActivation(model.density.scale, model.density.initial))
        pyramid = VoxelPyramid(
            _used_levels(model, trainer),
            harmonics.channels,
            scene.aabb,
            reduce="sum",
            init_range=model.init_range,
            device=device,
        )
        return RadianceField(pyramid, harmonics).to(device)
    density = DensityActivation(model.density.scale, model.density.initial)
    decoder = MLPDecoder(model.features, model.width, model.hidden, model.view_degree, density)
    resolution = cubic_voxels(scene.aabb, trainer.stages[0].resolution)
    grid = VoxelGrid(resolution, decoder.channels, scene.aabb, init_std=model.init_std, device=device)
    with torch.no_grad():
        grid.features[..., 0] = 0  # density starts even: noise would be mistaken for matter
    return RadianceField(grid, decoder).to(device)


def _used_levels(model: PyramidModelConfig | SHModelConfig, trainer: TrainerConfig) -> list[int]:
    """Returns the levels that the trainer's stages reach, at least the coarsest."""
    finest = max(stage.resolution for stage in trainer.stages)
    used = used_levels(model.resolutions, finest)
    left_out = [level for level in dict.fromkeys(model.resolutions) if level not in used]
    if left_out:
        logger.warning(
            "levels %s of model.resolutions are finer than all trainer.stages (%d): left out", left_out, finest
        )
    return used
