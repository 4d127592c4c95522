"""Colours of surface points."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField

# The normal itself, and as many directions around it, at this angle to it.
_AROUND = 6
_TILT = math.radians(45)


@torch.no_grad()
def surface_colors(field: RadianceField, points: Tensor, normals: Tensor, chunk: int) -> Tensor:
    """Returns the mean colour of surface points over views that face them.

    Views are along the normal, and along six directions around it, 45 degrees from it, so that a reflection seen from
    one of them does not become the surface's colour.

    Args:
        field: The field.
        points: (M, 3) world positions, on the field's device.
        normals: (M, 3) unit vectors that point out of the surface.
        chunk: Evaluations at once, to bound memory.

    Returns:
        (M, 3) in [0, 1], float32.
    """
    found = []
    count = _AROUND + 1
    for part, outwards in zip(points.split(max(chunk // count, 1)), normals.split(max(chunk // count, 1)), strict=True):
        views = -_directions_around(outwards)
        _, rgb = field(part.repeat_interleave(count, dim=0), views.reshape(-1, 3))
        found.append(rgb.view(-1, count, 3).mean(dim=1).clamp(0, 1))
    return torch.cat(found) if found else points.new_zeros(0, 3)


def _directions_around(normals: Tensor) -> Tensor:
    """Returns the unit normals (M, 3) and the directions around each of them, (M, 7, 3)."""
    # Duff et al. 2017, "Building an orthonormal basis, revisited": no direction is special.
    x, y, z = normals.unbind(-1)
    sign = torch.where(z < 0, -1.0, 1.0)
    a = -1 / (sign + z)
    b = x * y * a
    across = torch.stack((1 + sign * x * x * a, sign * b, -sign * x), dim=-1)
    along = torch.stack((b, sign + y * y * a, -y), dim=-1)
    turn = torch.arange(_AROUND, device=normals.device) * (2 * math.pi / _AROUND)
    ring = across[:, None] * turn.cos()[:, None] + along[:, None] * turn.sin()[:, None]
    tilted = math.cos(_TILT) * normals[:, None] + math.sin(_TILT) * ring
    return torch.cat((normals[:, None], tilted), dim=1)
