"""Visual hulls: the part of space that the images' transparent pixels do not rule out."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.foundation.checks import check_tensor
from voxelfield.progress import tracked
from voxelfield.rendering.cameras import Cameras, pixels_of_rays

# Largest angle above or below the horizon, radians, at which panoramas carve. Near their poles, a cell is as wide as
# the image.
_STEEPEST = math.pi / 3


@torch.no_grad()
def visual_hull(alpha: Tensor, cameras: Cameras, aabb: Tensor, resolution: tuple[int, int, int]) -> Tensor:
    """Carves away the cells that some image shows as entirely transparent (Laurentini 1994).

    Conservative: a cell remains if, in every image, the window of pixels around its centre that is certain to cover the
    cell contains a pixel with nonzero opacity, extends beyond the image, or lies where the camera does not look. Images
    without transparency carve nothing.

    Args:
        alpha: (N, H, W) uint8 opacity of N images, 0 where transparent; on any device. Pixels outside of an image that
            is smaller than H x W are not read.
        cameras: The N cameras, on the device on which to compute.
        aabb: (2, 3) box, world units, on that device.
        resolution: Number of cells along x, y and z.

    Returns:
        (X, Y, Z) bool on the device of ``aabb``: False for cells that are certainly empty.

    Raises:
        ValueError: ``alpha`` does not match the cameras.
    """
    check_tensor("alpha", alpha, (len(cameras), cameras.height, cameras.width), ", as the cameras say")
    # The coordinates of the cells' centres along each axis.
    axes = [
        low + (torch.arange(cells, device=aabb.device) + 0.5) * ((high - low) / cells)
        for low, high, cells in zip(*aabb, resolution, strict=True)
    ]
    allowed = torch.ones(resolution, dtype=torch.bool, device=aabb.device)
    reaches = _reaches(cameras.to("cpu"), aabb.cpu(), resolution)
    for index, reach in enumerate(tracked(reaches, "carving empty space")):
        width, height = cameras.size(index)
        image = alpha[index, :height, :width]
        if 2 * reach >= min(width, height) or bool(image.all()):
            continue
        column, row = _project(cameras, index, axes)
        inside = (column >= reach) & (column < width - reach)
        inside &= (row >= reach) & (row < height - reach)
        if cameras.spheres:
            _, fy, _, cy = cameras.intrinsics[index]
            inside &= ((row - cy).abs() < _STEEPEST * fy - 1) | ~cameras.is_sphere[index]
        opaque = _dilate((image > 0).to(aabb.device), reach)
        seen = opaque[row.clamp_(0, height - 1), column.clamp_(0, width - 1)]
        allowed &= seen | ~inside
    return allowed


def _project(cameras: Cameras, index: int, axes: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns columns and rows, int64 (X, Y, Z), of a lattice's points; a column outside a lens's image is negative."""
    right, down, depth = lattice_in_frame(axes, cameras.c2w[index])
    if cameras.lens is not None:
        column, row = pixels_of_rays(cameras, index, torch.stack((right, down, depth), dim=-1)).unbind(-1)
        return column, row
    fx, fy, cx, cy = cameras.intrinsics[index]
    return (cx + fx * right / depth).floor_().long(), (cy + fy * down / depth).floor_().long()


def lattice_in_frame(axes: list[Tensor], c2w: Tensor) -> list[Tensor]:
    """Returns how far right, down and forward of a camera (4, 4) a lattice's points are, (X, Y, Z) along each axis."""
    right, up, backward, origin = c2w[:3].unbind(dim=-1)
    sums = []
    for direction in (right, -up, -backward):
        x, y, z = ((axis - o) * d for axis, o, d in zip(axes, origin, direction, strict=True))
        sums.append((x[:, None] + y)[:, :, None] + z)
    return sums


def _reaches(cameras: Cameras, aabb: Tensor, resolution: tuple[int, int, int]) -> list[int]:
    """Returns, for each image, the largest distance in pixels between a cell's image and its centre's; on the host.

    All cells of an image use the largest of these distances, so one dilation of the image replaces a window per cell.
    """
    size = (aabb[1] - aabb[0]) / torch.tensor(resolution)
    radius = 0.5 * float(size.norm())
    if cameras.lens is not None or cameras.rolling is not None:
        return _angular_reaches(cameras, aabb + 0.5 * torch.stack((size, -size)), radius)
    corners = torch.cartesian_prod(*(aabb + 0.5 * torch.stack((size, -size))).unbind(-1))
    reaches = []
    sizes = cameras.all_sizes().tolist()
    for c2w, intrinsics, (width, height) in zip(cameras.c2w, cameras.intrinsics, sizes, strict=True):
        fx, fy, cx, cy = intrinsics.tolist()
        nearest = float(((c2w[:3, 3] - corners) * c2w[:3, 2]).sum(-1).min()) - radius
        # Off the axis, the image of a ball is longer than on it.
        slant = math.hypot(1, max(cx, width - cx) / fx, max(cy, height - cy) / fy)
        reaches.append(math.ceil(max(fx, fy) * radius * slant / nearest) + 1 if nearest > 0 else width)
    return reaches


def _angular_reaches(cameras: Cameras, centres: Tensor, radius: float) -> list[int]:
    """Computes the same for lenses: the angular sizes of balls, enlarged by the motion of a rolling shutter."""
    origins, motion = cameras.c2w[:, :3, 3], cameras.largest_motion()
    nearest = (origins - origins.maximum(centres[0]).minimum(centres[1])).norm(dim=-1)
    angles = replace(cameras, rolling=None).pixel_angles()[:, 0]
    focal = cameras.intrinsics[:, :2].amax(dim=1)
    reaches = []
    for distance, (turn, move), angle, sphere, fx in zip(
        *(each.tolist() for each in (nearest, motion, angles, cameras.is_sphere, focal)), strict=True
    ):
        reach = math.inf
        if distance > radius + move:
            size = math.asin((radius + move) / distance) + turn
            if not sphere:
                reach = size / angle if angle > 0 else math.inf
            elif (wide := math.sin(size) / math.cos(_STEEPEST)) < 1 and size < math.pi / 2:
                reach = fx * math.asin(wide)
        reaches.append(math.ceil(min(reach, cameras.width)) + 1)
    return reaches


def _dilate(mask: Tensor, reach: int) -> Tensor:
    """Dilates a mask (H, W) by a square of ``2 * reach + 1`` pixels."""
    spread = mask[None, None].float()
    window = 2 * reach + 1
    spread = F.max_pool2d(spread, (1, window), stride=1, padding=(0, reach))
    spread = F.max_pool2d(spread, (window, 1), stride=1, padding=(reach, 0))
    return spread[0, 0] > 0
