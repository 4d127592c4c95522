"""Construction of a run's field from its settings."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField
from voxelfield.grids.boxes import box_tensor, parse_box
from voxelfield.models.recipe import Recipe
from voxelfield.training.config import SceneConfig, TrainerConfig


def grid_box(scene: SceneConfig) -> Tensor:
    """Returns the box (2, 3) of a field's grid, in the frame of the scene if it is not the world's.

    Raises:
        ValueError: The scene has no box.
    """
    if scene.aabb is None:
        raise ValueError("scene.aabb must be the box that the field was trained in, got None")
    frame = scene.frame
    return box_tensor(parse_box(scene.aabb) if frame is None else frame.frame_aabb, torch.device("cpu"))


def untrained_field(
    recipe: Recipe, scene: SceneConfig, trainer: TrainerConfig, device: torch.device | str
) -> RadianceField:
    """Builds a field in its state at the start of training.

    Args:
        recipe: The kind of field.
        scene: The scene, which defines the field's box.
        trainer: The training loop, which defines the resolutions.
        device: Device of the field; may be ``meta``, to find out shapes only.

    Raises:
        ValueError: The scene has no box, or it is unbounded and this kind of field does not support that.
    """
    field = recipe.build(grid_box(scene), trainer.resolutions, device)
    if scene.frame is not None:
        if not isinstance(field, RadianceField):
            given = "scene.ndc must be false" if scene.ndc else "scene.boxes must be 1"
            got = "true" if scene.ndc else scene.boxes
            raise ValueError(f"{given} for a {type(field).__name__}, which is no RadianceField, got {got}")
        field.frame = scene.frame
    return field
