"""Rendering settings from the configuration: for previews, the evaluation, the video, and loaded runs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField
from voxelfield.models.recipe import Recipe
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.training.batch import background_for
from voxelfield.training.config import TrainerConfig

# Largest number of samples along the diagonal of a grid's box. Without nested boxes, a grid of 400^3 voxels and the
# presets' distance between samples have 866.
_MAX_SAMPLES = 32768


def render_settings(config: TrainerConfig, field: RadianceField) -> RenderSettings:
    """Returns the sampling settings at a field's current resolution; synchronises with the device.

    Raises:
        ValueError: A ray could have more samples than can be rendered in a reasonable time.
    """
    low, high = field.grid.aabb
    voxel, diagonal = torch.stack((field.grid.voxel_size.min(), (high - low).norm())).tolist()
    step = config.render.voxels_per_step * voxel
    if not (math.isfinite(diagonal) and diagonal <= _MAX_SAMPLES * step):
        least = diagonal / max(_MAX_SAMPLES * voxel, 1e-30)
        raise ValueError(
            f"trainer.render.voxels_per_step must be at least {least:.3g}, so that no ray through the grid's box has "
            f"more than {_MAX_SAMPLES} samples, got {config.render.voxels_per_step:g}"
        )
    return RenderSettings(
        step=step,
        min_transmittance=config.render.min_transmittance,
        min_weight=config.render.min_weight,
    )


def evaluation_background(config: TrainerConfig, device: torch.device) -> Tensor:
    """Returns the background colour (3,) for rendering and evaluating views."""
    return background_for(config.evaluation_background, 1, device)[0]


def view_renderer(
    field: RadianceField,
    occupancy: OccupancyGrid,
    config: TrainerConfig,
    recipe: Recipe,
    backend: str | None = None,
    *,
    supersampling: int | None = None,
    background: Tensor | None = None,
) -> FieldRenderer:
    """Returns a renderer of a field's current state, by default with the settings of the evaluation.

    Args:
        field: The field.
        occupancy: The occupied cells, on the field's device.
        config: Settings of the training loop.
        recipe: The recipe that built the field.
        backend: As for :class:`voxelfield.FieldRenderer`.
        supersampling: As for :class:`voxelfield.FieldRenderer`; None for that of the evaluation.
        background: (3,) float32 on the field's device; None for that of the evaluation.
    """
    return FieldRenderer(
        field,
        occupancy,
        render_settings(config, field),
        evaluation_background(config, field.aabb.device) if background is None else background,
        supersampling=config.evaluation.supersampling if supersampling is None else supersampling,
        pixel_averaging=config.pixel_averaging,
        chunk=config.chunk,
        precision=getattr(torch, config.precision),
        backend=backend,
        backends=recipe.image_backends,
    )
