"""Projection of points into images."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.rendering.cameras import Cameras

_SAME_RAY = 1e-3  # radians
_LATTICE = 9  # points along each axis of a box
_PIXELS = 16  # points along each side of an image


def pixels_of_rays(cameras: Cameras, index: int, rays: Tensor) -> Tensor:
    """Returns the pixels that rays of one camera pass through, as if all rows of its image had its pose.

    Args:
        cameras: The cameras.
        index: Index of the camera.
        rays: (..., 3) right, down and forward in the camera's frame, of any length, on the cameras' device.

    Returns:
        (..., 2) int64 column and row, which may be outside the image; negative for rays that it cannot show.
    """
    intrinsics = cameras.intrinsics[index]
    if cameras.lens is None:
        points, shown = rays[..., :2] / rays[..., 2:], rays[..., 2] > 0
    else:
        flat = rays.reshape(-1, 3)
        points = cameras.lens.points_of(flat, index)
        back = cameras.lens.rays_through(points, torch.full_like(points[:, 0], index, dtype=torch.int64))
        error = (F.normalize(back, dim=-1) - F.normalize(flat, dim=-1)).norm(dim=-1)
        # The comparison is written so that it is False for NaN, i.e. points that overflowed are not shown.
        points, shown = points.view(*rays.shape[:-1], 2), (error <= _SAME_RAY).view(rays.shape[:-1])
    pixels = points * intrinsics[:2] + intrinsics[2:]
    if cameras.spheres:
        # A partial panorama may continue across the seam at pi.
        column = pixels[..., 0].remainder(2 * math.pi * intrinsics[0])
        pixels = torch.where(cameras.is_sphere[index], torch.stack((column, pixels[..., 1]), dim=-1), pixels)
    pixels = pixels.floor()
    return torch.where(shown[..., None], pixels, -1.0).long()


def views_of_points(cameras: Cameras, points: Tensor, near: float = 0.0) -> Tensor:
    """Counts the cameras (M,) int64 in whose images points (M, 3) lie, except those up to a distance ``near``.

    Occlusion and the motion of rolling shutters are disregarded.
    """
    count = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    for rays, shown in _seen(cameras, points):
        count += shown & (rays.norm(dim=-1) > near)
    return count


def sees_box(cameras: Cameras, aabb: Tensor) -> Tensor:
    """Returns which cameras (N,) bool have a point of a lattice over a box (2, 3), world units, in their images."""
    along = torch.linspace(0, 1, _LATTICE, device=aabb.device)
    points = aabb[0] + torch.cartesian_prod(along, along, along) * (aabb[1] - aabb[0])
    return torch.stack([shown.any() for _, shown in _seen(cameras, points)])


def fraction_through_box(cameras: Cameras, aabb: Tensor) -> float:
    """Returns the fraction of rays that cross a box (2, 3), if pixels are drawn as in training, from a lattice.

    Pixels of panoramas are weighted by their solid angle.
    """
    steps = (torch.arange(_PIXELS, device=aabb.device) + 0.5) / _PIXELS
    sizes = cameras.all_sizes().to(aabb.device)
    points = (torch.cartesian_prod(steps, steps) * sizes[:, None]).view(-1, 2)
    index = torch.arange(len(cameras), device=aabb.device).repeat_interleave(_PIXELS**2)
    rays = cameras.rays(index, points, aabb)
    weights = cameras.relative_solid_angles(index, points[:, 1]) * sizes.prod(dim=1)[index]
    return float(((rays.far > rays.near) * weights).sum() / weights.sum())


def _seen(cameras: Cameras, points: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields, for each camera, its rays (M, 3) to points (M, 3), in its frame, and which of these its image shows."""
    sizes = cameras.all_sizes().to(points.device)
    to_ray = torch.tensor([1.0, -1.0, -1.0], device=points.device)  # from OpenGL's axes
    for index, c2w in enumerate(cameras.c2w):
        rays = ((points - c2w[:3, 3]) @ c2w[:3, :3]) * to_ray
        pixels = pixels_of_rays(cameras, index, rays)
        yield rays, ((pixels >= 0) & (pixels < sizes[index])).all(dim=-1)


def distance_to_nearest(cameras: Cameras, points: Tensor) -> Tensor:
    """Returns the distances (M,) of points (M, 3) from their nearest camera, world units."""
    nearest = torch.full((len(points),), torch.inf, device=points.device)
    for origin in cameras.c2w[:, :3, 3]:
        nearest = torch.minimum(nearest, (points - origin).norm(dim=-1))
    return nearest
