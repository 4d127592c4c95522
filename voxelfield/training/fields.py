"""Construction of a run's model from its settings."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField
from voxelfield.grids.boxes import box_extent, box_tensor, parse_box
from voxelfield.models.model import Model
from voxelfield.models.model_config import ModelConfig
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.training.config import RunConfig, SceneConfig, TrainerConfig
from voxelfield.warps.warp import Warp


def grid_box(scene: SceneConfig) -> Tensor:
    """Returns the box (2, 3) of a field's grid, in warped coordinates of the scene if it is not the world's.

    Raises:
        ValueError: The scene has no box.
    """
    if scene.aabb is None:
        raise ValueError("scene.aabb must be the box that the field was trained in, got None")
    warp = scene.warp
    return box_tensor(parse_box(scene.aabb) if warp is None else warp.warped_aabb, torch.device("cpu"))


def untrained_field(
    model_config: ModelConfig, scene: SceneConfig, trainer: TrainerConfig, device: torch.device | str
) -> RadianceField:
    """Builds a field in its state at the start of training.

    Args:
        model_config: The kind of field.
        scene: The scene, which defines the field's box.
        trainer: The training loop, which defines the resolutions.
        device: Device of the field; may be ``meta``, to find out shapes only.

    Raises:
        ValueError: The scene has no box, or it is unbounded and this kind of field does not support that.
    """
    field = model_config.build(grid_box(scene), trainer.resolutions, device)
    if scene.warp is not None:
        if not isinstance(field, RadianceField):
            given = "scene.ndc must be false" if scene.ndc else "scene.boxes must be 1"
            got = "true" if scene.ndc else scene.boxes
            raise ValueError(f"{given} for a {type(field).__name__}, which is no RadianceField, got {got}")
        field.warp = scene.warp
    return field


def untrained_model(config: RunConfig, device: torch.device | str) -> Model:
    """Builds a model in its state at the start of training, with all cells occupied.

    Args:
        config: The settings of the run.
        device: Device of the model; may be ``meta``, to find out shapes only.

    Raises:
        ValueError: As for :func:`untrained_field`.
    """
    trainer = config.trainer
    field = untrained_field(config.model, config.scene, trainer, device)
    with torch.device(device):
        occupancy = OccupancyGrid(_cells(config.scene.warp, trainer.occupancy.resolution), grid_box(config.scene))
    return config.model.build_model(field, occupancy, trainer.sampling)


def _cells(warp: Warp | None, resolution: int) -> int | list[int]:
    """Returns the number of cells; in a warp other than the world's, this many per two of its units."""
    if warp is None:
        return resolution
    return [max(1, round(resolution * extent / 2)) for extent in box_extent(warp.warped_aabb)]
