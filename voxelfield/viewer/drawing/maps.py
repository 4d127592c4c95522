"""Pictures of quantities other than colour."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.rendering.images import turbo

MANY_SAMPLES = 64
"""Samples of a ray that are drawn in the last colour of the map."""

# Below this opacity a pixel shows nothing that has a depth or a normal.
_SOLID = 0.5


def depth_map(depth: Tensor, opacity: Tensor, nearest: float, farthest: float) -> Tensor:
    """Draws distances in Turbo colours, from near in blue to far in red, and white where there is nothing.

    Args:
        depth: (H, W) world units.
        opacity: (H, W) in [0, 1].
        nearest: Distance of the first colour, world units.
        farthest: Distance of the last colour. Infinity, for scenes without end, draws ``1 - nearest / depth``.

    Returns:
        (H, W, 3) in [0, 1].
    """
    if farthest == float("inf"):
        far = 1 - nearest / depth.clamp(min=nearest)
    else:
        far = (depth - nearest) / max(farthest - nearest, 1e-6)
    return _where_solid(turbo(far.nan_to_num()), opacity)


def normal_map(depth: Tensor, opacity: Tensor, origin: Tensor, directions: Tensor) -> Tensor:
    """Draws the normals of the surface that distances describe, x, y and z of the world as red, green and blue.

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


def opacity_map(opacity: Tensor) -> Tensor:
    """Draws opacities (H, W) from black to white, as (H, W, 3)."""
    return opacity[..., None].expand(*opacity.shape, 3)


def sample_map(counts: Tensor) -> Tensor:
    """Draws numbers of samples (H, W) in Turbo colours up to :data:`MANY_SAMPLES`, white for none, as (H, W, 3)."""
    colors = turbo(counts.to(torch.float32) / MANY_SAMPLES)
    return torch.where((counts > 0)[..., None], colors, torch.ones_like(colors))


def brightened(rgb: Tensor, stops: float) -> Tensor:
    """Multiplies the light of sRGB colours in [0, 1] by a power of two."""
    if stops == 0:
        return rgb
    encoded = rgb.clamp(0, 1)
    light = torch.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4) * 2.0**stops
    light = light.clamp(0, 1)
    return torch.where(light <= 0.0031308, light * 12.92, 1.055 * light.clamp(min=1e-8) ** (1 / 2.4) - 0.055)


def _where_solid(colors: Tensor, opacity: Tensor) -> Tensor:
    return torch.where((opacity > _SOLID)[..., None], colors, torch.ones_like(colors))
