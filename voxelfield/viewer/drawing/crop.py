"""A field of which only a part is drawn."""

from __future__ import annotations

import copy

import torch

from voxelfield.grids.boxes import Box, box_tensor
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.warps.warp import Warp


def cropped(occupancy: OccupancyGrid, box: Box, warp: Warp | None) -> OccupancyGrid:
    """Returns a copy in which no cell is occupied whose centre lies outside of a box.

    Args:
        occupancy: The cells.
        box: (2, 3) low and high corner, world units.
        warp: The warp of the cells; None for the world frame.
    """
    device = occupancy.aabb.device
    low, high = occupancy.aabb
    steps = [
        low[axis] + (torch.arange(cells, device=device) + 0.5) / cells * (high - low)[axis]
        for axis, cells in enumerate(occupancy.occupied.shape)
    ]
    centres = torch.stack(torch.meshgrid(*steps, indexing="ij"), dim=-1)
    if warp is not None:
        centres = warp.to_world(centres.view(-1, 3))[0].view_as(centres)
    limits = box_tensor(box, device)
    inside = ((centres >= limits[0]) & (centres <= limits[1])).all(dim=-1)
    part = copy.deepcopy(occupancy)
    part.occupied.logical_and_(inside)
    return part
