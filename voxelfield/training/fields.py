"""Construction of a run's model from its settings."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField
from voxelfield.grids.boxes import box_extent, box_tensor, parse_box
from voxelfield.models.model import Model
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.training.config import RunConfig
from voxelfield.warps.warp import Warp


def grid_box(config: RunConfig) -> Tensor:
    """Returns the box (2, 3) of a field's grid, in warped coordinates if the run has a warp.

    Raises:
        ValueError: The scene has no box.
    """
    if config.scene.aabb is None:
        raise ValueError("scene.aabb must be the box that the field was trained in, got None")
    warp = config.recorded_warp
    return box_tensor(parse_box(config.scene.aabb) if warp is None else warp.warped_aabb, torch.device("cpu"))


def untrained_field(config: RunConfig, device: torch.device | str) -> RadianceField:
    """Builds a field in its state at the start of training.

    Args:
        config: The settings of the run, with the recorded box and warp.
        device: Device of the field; may be ``meta``, to find out shapes only.

    Raises:
        ValueError: The scene has no box, or it has a warp, which this kind of field does not support.
    """
    field = config.model.build(grid_box(config), config.trainer.resolutions, device)
    warp = config.recorded_warp
    if warp is not None:
        if not isinstance(field, RadianceField):
            name, wanted = ("ndc", "false") if warp.is_forward_facing else ("boxes", 1)
            raise ValueError(f"warp.{name} must be {wanted} for a {type(field).__name__}, which is no RadianceField")
        field.warp = warp
    return field


def untrained_model(config: RunConfig, device: torch.device) -> Model:
    """Builds a model in its state at the start of training, with all cells occupied.

    Args:
        config: As for :func:`untrained_field`.
        device: Device of the model.

    Raises:
        ValueError: As for :func:`untrained_field`.
    """
    field = untrained_field(config, device)
    cells = _cells(config.recorded_warp, config.trainer.occupancy.resolution)
    occupancy = OccupancyGrid(cells, grid_box(config)).to(device)
    return Model(field, occupancy, config.model, config.trainer.sampling)


def _cells(warp: Warp | None, resolution: int) -> int | list[int]:
    """Returns the number of cells; with a warp, this many per two units of warped coordinates."""
    if warp is None:
        return resolution
    return [max(1, round(resolution * extent / 2)) for extent in box_extent(warp.warped_aabb)]
