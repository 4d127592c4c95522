"""Median depth maps: the distance at which half of a pixel's light has been absorbed."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.fields.field import Field, warp_of
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.render import render


@torch.no_grad()
def depth_maps(
    field: Field, occupancy: OccupancyGrid, settings: RenderSettings, cameras: Cameras, chunk: int
) -> Tensor:
    """Renders the median depth of every pixel of some cameras.

    The median is the distance at which a ray has lost half of its light. Unlike the mean, it is never between two
    surfaces that a pixel shows both of.

    Args:
        field: The field.
        occupancy: Where to sample, on the field's device.
        settings: How to sample.
        cameras: N cameras; lenses count.
        chunk: Rays at once, to bound memory.

    Returns:
        (N, H, W) distances along the rays, world units; infinite where more than half of the light comes through, and
        outside of images that are smaller than H x W.
    """
    device = field.aabb.device
    cameras = cameras.to(device)
    maps = torch.full((len(cameras), cameras.height, cameras.width), torch.inf, device=device)
    for camera, image in enumerate(maps):
        rays, (width, height) = cameras.image_rays(camera, field.aabb), cameras.size(camera)
        parts = [rays[first : first + chunk] for first in range(0, len(rays), chunk)]
        depths = torch.cat([_median_depth(field, part, occupancy, settings) for part in parts])
        image[:height, :width] = depths.view(height, width)
    return maps


def _median_depth(field: Field, rays: Rays, occupancy: OccupancyGrid, settings: RenderSettings) -> Tensor:
    """Returns the depth (R,) of each ray, linear within the sample that takes the second half of its light."""
    found = render(field, rays, occupancy, settings)
    samples, weights = found.samples, found.weights.double()
    if not len(weights):
        return torch.full_like(rays.near, torch.inf)
    warp = warp_of(field)
    middle, length = samples.t, samples.dt
    if warp is not None:
        middle = warp.world_distances(samples, rays.origins, rays.directions)
        length = warp.world_lengths(samples, rays.origins, rays.directions)
    absorbed = weights.cumsum(0)
    before = torch.cat((absorbed.new_zeros(1), absorbed))
    start, stop = samples.ray_offsets[:-1], samples.ray_offsets[1:]
    wanted = before[start] + 0.5
    at = torch.searchsorted(absorbed, wanted)
    reached = at < stop
    at = at.clamp(max=len(weights) - 1)
    share = ((wanted - before[at]) / weights[at]).clamp(0, 1)
    depth = middle[at] + (share.float() - 0.5) * length[at]
    return torch.where(reached, depth, torch.inf)
