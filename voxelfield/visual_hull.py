"""Where matter can be at all, as far as the images' transparent pixels tell."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.cameras import Cameras


@torch.no_grad()
def visual_hull(alpha: Tensor, cameras: Cameras, aabb: Tensor, resolution: tuple[int, int, int]) -> Tensor:
    """Carves away the cells that some image shows as transparent throughout (Laurentini 1994).

    Conservative: a cell is kept if the window of pixels around its centre that surely covers it holds a pixel with any
    opacity, reaches over the image's border, or lies behind the camera. Images without transparency carve nothing.

    Args:
        alpha: (N, H, W) uint8 opacity of N images, 0 where transparent; on any device.
        cameras: The N cameras, on the device that computes.
        aabb: (2, 3) box, world units, on that device.
        resolution: Number of cells along x, y and z.

    Returns:
        (X, Y, Z) bool on the device of ``aabb``: False where there can be nothing.

    Raises:
        ValueError: ``alpha`` does not fit the cameras.
    """
    if alpha.shape != (len(cameras), cameras.height, cameras.width):
        expected = (len(cameras), cameras.height, cameras.width)
        raise ValueError(f"alpha must have shape {expected}, as the cameras say, got {tuple(alpha.shape)}")
    centres, radius = _cells(aabb, resolution)
    possible = torch.ones(centres.shape[0], dtype=torch.bool, device=aabb.device)
    for index in range(len(cameras)):
        image = alpha[index]
        if bool(image.all()):
            continue
        right, up, backward, origin = cameras.c2w[index, :3].unbind(-1)
        fx, fy, cx, cy = cameras.intrinsics[index].tolist()
        offset = centres - origin
        depth = -(offset * backward).sum(-1)
        nearest = float(depth.min()) - radius
        # Dilating the image by the largest footprint of any cell spares a window of its own for each.
        # Away from the axis a ball's image is longer than on it.
        slant = math.hypot(1, max(cx, cameras.width - cx) / fx, max(cy, cameras.height - cy) / fy)
        reach = math.ceil(max(fx, fy) * radius * slant / nearest) + 1 if nearest > 0 else cameras.width
        if 2 * reach >= min(cameras.width, cameras.height):
            continue
        column = (cx + fx * (offset * right).sum(-1) / depth).floor().long()
        row = (cy - fy * (offset * up).sum(-1) / depth).floor().long()
        inside = (column >= reach) & (column < cameras.width - reach)
        inside &= (row >= reach) & (row < cameras.height - reach)
        opaque = _dilate((image > 0).to(aabb.device), reach)
        seen = opaque[row.clamp(0, cameras.height - 1), column.clamp(0, cameras.width - 1)]
        possible &= seen | ~inside
    return possible.view(resolution)


def _cells(aabb: Tensor, resolution: tuple[int, int, int]) -> tuple[Tensor, float]:
    """Returns the centres (X * Y * Z, 3) of a box's cells and the radius of a ball around one."""
    size = (aabb[1] - aabb[0]) / torch.tensor(resolution, dtype=aabb.dtype, device=aabb.device)
    axes = [aabb[0, a] + (torch.arange(n, device=aabb.device) + 0.5) * size[a] for a, n in enumerate(resolution)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(-1, 3), 0.5 * float(size.norm())


def _dilate(mask: Tensor, reach: int) -> Tensor:
    """Spreads a mask (H, W) by a square of ``2 * reach + 1`` pixels."""
    spread = mask[None, None].float()
    window = 2 * reach + 1
    spread = F.max_pool2d(spread, (1, window), stride=1, padding=(0, reach))
    spread = F.max_pool2d(spread, (window, 1), stride=1, padding=(reach, 0))
    return spread[0, 0] > 0
