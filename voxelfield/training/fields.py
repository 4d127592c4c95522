"""Construction of a run's field from its settings."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField
from voxelfield.fields.recipes.recipe import Recipe
from voxelfield.grids.boxes import box_tensor, parse_box
from voxelfield.training.config import SceneConfig, TrainerConfig


def grid_box(scene: SceneConfig) -> Tensor:
    """Returns the box (2, 3) of a field's grid, in the frame of the scene's nested boxes if it has any.

    Raises:
        ValueError: The scene has no box.
    """
    if scene.aabb is None:
        raise ValueError("scene.aabb must be the box that the field was trained in, got None")
    boxes = scene.nested
    return box_tensor(parse_box(scene.aabb) if boxes is None else boxes.frame_aabb, torch.device("cpu"))


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
        ValueError: The scene has no box, or it has nested boxes and this kind of field does not support them.
    """
    field = recipe.build(grid_box(scene), trainer.resolutions, device)
    if scene.nested is not None:
        if not isinstance(field, RadianceField):
            raise ValueError(
                f"scene.boxes must be 1 for a {type(field).__name__}, which is no RadianceField, got {scene.boxes}"
            )
        field.boxes = scene.nested
    return field
