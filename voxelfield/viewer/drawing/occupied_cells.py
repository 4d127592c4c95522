"""Pictures of the occupancy grid."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.rendering.images import turbo
from voxelfield.rendering.march import march
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays
from voxelfield.warps.warp import Warp

# How bright a face is by the axis that it is perpendicular to, so that edges show.
_SHADES = (0.8, 0.62, 1.0)


def cell_map(rays: Rays, occupancy: OccupancyGrid, step: float, warp: Warp | None) -> Tensor:
    """Draws the first occupied cell that each ray meets, as a shaded block.

    Colours change along the z axis in warped coordinates, which in normalised device coordinates is the depth; those of
    nested boxes also change from box to box.

    Args:
        rays: R rays.
        occupancy: The cells, on the rays' device.
        step: Distance between the samples that look for a cell, in warped coordinates; below a cell's edge.
        warp: The warp of the cells; None for the world frame.

    Returns:
        (R, 3) colours in [0, 1], white where a ray meets none.
    """
    samples = march(rays, occupancy, step, warp=warp)
    first, counts = samples.ray_offsets[:-1], samples.ray_offsets.diff()
    colors = torch.ones(len(rays), 3, device=rays.origins.device)
    met = counts > 0
    if not bool(met.any()):
        return colors
    warped, directions = samples.positions[first[met]], _directions(rays, warp)[met]
    low, high = occupancy.aabb
    cells = torch.tensor(occupancy.occupied.shape, device=warped.device)
    edge = (high - low) / cells
    index = ((warped - low) / edge).floor().clamp(cells.new_zeros(()), cells - 1)
    # Back along the ray, the face that is reached first is the one that the ray came in through.
    entered = torch.where(directions > 0, low + index * edge, low + (index + 1) * edge)
    back = ((warped - entered) / directions).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    face = back.argmin(dim=-1)
    height = (index[:, 2] + 0.5) / cells[2]
    if warp is not None:
        box = warp.to_world(warped)[1]
        height = (height + 0.37 * box) % 1.0
    shade = torch.tensor(_SHADES, device=warped.device)[face]
    # Neighbouring cells of one height differ a little, or a flat floor would hide the grid.
    chequer = 1 - 0.08 * (index.sum(dim=-1) % 2)
    colors[met] = turbo(0.1 + 0.8 * height) * (shade * chequer)[:, None]
    return colors


def _directions(rays: Rays, warp: Warp | None) -> Tensor:
    """Returns the directions (R, 3) of rays in warped coordinates."""
    if warp is None:
        return rays.directions
    return warp.map_rays(rays.origins, rays.directions, rays.near, rays.far)[1]
