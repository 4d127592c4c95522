"""Construction of a run's model from its settings."""

from __future__ import annotations

import torch

from voxelfield.fields.environment import Environment
from voxelfield.fields.field import RadianceField
from voxelfield.grids.boxes import box_extent, box_tensor, parse_box
from voxelfield.models.model import Model
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.settings import RunConfig


def untrained_model(config: RunConfig, device: torch.device | str) -> Model:
    """Builds a model in its state at the start of training, with all cells occupied.

    Args:
        config: The settings of the run, with the recorded box and warp.
        device: Device of the model; may be ``meta``, to find out shapes only.

    Raises:
        ValueError: The scene has no box, or it has a warp, which this kind of field does not support.
    """
    if config.scene.aabb is None:
        raise ValueError("scene.aabb must be the box that the field was trained in, got None")
    warp, trainer = config.recorded_warp, config.trainer
    box = parse_box(config.scene.aabb) if warp is None else warp.warped_aabb
    aabb = box_tensor(box, torch.device("cpu"))
    cells: int | list[int] = trainer.occupancy.resolution
    if warp is not None:
        # As many cells per two units of warped coordinates.
        cells = [max(1, round(trainer.occupancy.resolution * extent / 2)) for extent in box_extent(box)]
    field = config.model.build(aabb, trainer.resolutions, device)
    if warp is not None:
        if not isinstance(field, RadianceField):
            name, wanted = ("ndc", "false") if warp.is_forward_facing else ("boxes", 1)
            raise ValueError(f"warp.{name} must be {wanted} for a {type(field).__name__}, which is no RadianceField")
        field.warp = warp
    if config.model.environment == "map":
        field.environment = Environment(device)
    with torch.device(device):
        occupancy = OccupancyGrid(cells, aabb)
    return config.model.build_model(field, occupancy, trainer.sampling)
