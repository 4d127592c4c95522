"""Pictures of quantities other than colour."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.rendering.images import turbo
from voxelfield.rendering.march import march
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays
from voxelfield.warps.warp import Warp

MANY_SAMPLES = 64
"""Samples of a ray that are drawn in the last colour of the map."""

_SOLID = 0.5
"""Opacity below which a pixel has no depth and no normal."""

_FACE_SHADES = (0.8, 0.62, 1.0)
"""Brightness of a face by the axis perpendicular to it, which makes edges visible."""


def depth_map(depth: Tensor, opacity: Tensor, nearest: float, farthest: float) -> Tensor:
    """Draws distances in Turbo colours, from near in blue to far in red, and white where there is nothing.

    Args:
        depth: (H, W) world units.
        opacity: (H, W) in [0, 1].
        nearest: Distance of the first colour, world units.
        farthest: Distance of the last colour. Infinity, for unbounded scenes, draws ``1 - nearest / depth``.

    Returns:
        (H, W, 3) in [0, 1].
    """
    if farthest == float("inf"):
        far = 1 - nearest / depth.clamp(min=nearest)
    else:
        far = (depth - nearest) / max(farthest - nearest, 1e-6)
    return _where_solid(turbo(far.nan_to_num()), opacity)


def normal_map(depth: Tensor, opacity: Tensor, origin: Tensor, directions: Tensor) -> Tensor:
    """Draws the normals of the surface given by distances: x, y and z of the world as red, green and blue.

    Args:
        depth: (H, W) distances along the rays, world units; at least 2 x 2.
        opacity: (H, W) in [0, 1].
        origin: (3,) of the rays.
        directions: (H, W, 3) of the rays, unit length.

    Returns:
        (H, W, 3) in [0, 1].
    """
    points = origin + directions * depth[..., None]
    down, right = torch.gradient(points, dim=(0, 1))
    normals = F.normalize(torch.linalg.cross(down, right), dim=-1)
    away = (normals * directions).sum(dim=-1, keepdim=True) > 0
    return _where_solid(0.5 + 0.5 * torch.where(away, -normals, normals), opacity)


def sample_map(counts: Tensor) -> Tensor:
    """Draws numbers of samples (H, W) in Turbo colours up to :data:`MANY_SAMPLES`, white for none, as (H, W, 3)."""
    colors = turbo(counts.to(torch.float32) / MANY_SAMPLES)
    return torch.where((counts > 0)[..., None], colors, torch.ones_like(colors))


def cell_map(rays: Rays, occupancy: OccupancyGrid, step: float, warp: Warp | None) -> Tensor:
    """Draws the first occupied cell that each ray meets, as a shaded block.

    Colours vary along the z axis in warped coordinates, which in normalised device coordinates is the depth, and from
    box to box in nested boxes.

    Args:
        rays: R rays.
        occupancy: The cells, on the rays' device.
        step: Distance between the samples that look for a cell, in warped coordinates; below a cell's edge.
        warp: The warp of the cells, if any.

    Returns:
        (R, 3) colours in [0, 1], white where a ray meets no cell.
    """
    samples = march(rays, occupancy, step, warp=warp)
    first, counts = samples.ray_offsets[:-1], samples.ray_offsets.diff()
    colors = torch.ones(len(rays), 3, device=rays.origins.device)
    met = counts > 0
    if not bool(met.any()):
        return colors
    directions = rays.directions
    if warp is not None:
        directions = warp.map_rays(rays.origins, rays.directions, rays.near, rays.far)[1]
    warped, directions = samples.positions[first[met]], directions[met]
    low, high = occupancy.aabb
    cells = torch.tensor(occupancy.occupied.shape, device=warped.device)
    edge = (high - low) / cells
    index = ((warped - low) / edge).floor().clamp(cells.new_zeros(()), cells - 1)
    # Going back along the ray, the first face is the one through which the ray has entered.
    entered = torch.where(directions > 0, low + index * edge, low + (index + 1) * edge)
    back = ((warped - entered) / directions).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    face = back.argmin(dim=-1)
    height = (index[:, 2] + 0.5) / cells[2]
    if warp is not None:
        box = warp.to_world(warped)[1]
        height = (height + 0.37 * box) % 1.0
    shade = torch.tensor(_FACE_SHADES, device=warped.device)[face]
    # A chequered pattern shows the grid on flat floors.
    chequer = 1 - 0.08 * (index.sum(dim=-1) % 2)
    colors[met] = turbo(0.1 + 0.8 * height) * (shade * chequer)[:, None]
    return colors


def _where_solid(colors: Tensor, opacity: Tensor) -> Tensor:
    return torch.where((opacity > _SOLID)[..., None], colors, torch.ones_like(colors))
