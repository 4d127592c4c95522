"""Which part of space cameras see."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.fields.field import Field
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings, visible_samples
from voxelfield.rendering.occupancy import OccupancyGrid


@torch.no_grad()
def visible_cells(
    field: Field,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    cameras: Cameras,
    resolution: int,
    chunk: int = 1 << 17,
) -> Tensor:
    """Marks the cells in which some pixel of some camera has a sample that shows.

    Args:
        field: What is seen.
        occupancy: Where there is something to sample, on the field's device. Its box is divided into cells.
        settings: How rays are sampled, and what is too faint to show.
        cameras: One ray is cast through the centre of each of their pixels.
        resolution: Number of cells along each axis.
        chunk: Rays at once, to bound memory.

    Returns:
        (resolution, resolution, resolution) bool, on the field's device.
    """
    aabb = occupancy.aabb
    cameras = cameras.to(aabb.device)
    seen = torch.zeros(resolution**3, dtype=torch.bool, device=aabb.device)
    to_cells = resolution / (aabb[1] - aabb[0])
    for camera in range(len(cameras)):
        rays = cameras.image_rays(camera, field.aabb)
        for first in range(0, len(rays), chunk):
            packed, _ = visible_samples(field, rays[first : first + chunk], occupancy, settings)
            x, y, z = ((packed.positions - aabb[0]) * to_cells).long().clamp_(0, resolution - 1).unbind(-1)
            seen[(x * resolution + y) * resolution + z] = True
    return seen.view(resolution, resolution, resolution)
