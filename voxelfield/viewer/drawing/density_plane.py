"""The density on a plane through the scene."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from voxelfield.rendering.images import turbo

_PALE = 0.7
# How much the plane hides where it is empty, and where it is opaque.
_EMPTY, _OPAQUE = 0.5, 0.95


def draw_density(
    picture: Tensor,
    origin: Tensor,
    directions: Tensor,
    box: Tensor,
    axis: int,
    position: float,
    optical_depth: Callable[[Tensor], Tensor],
) -> Tensor:
    """Draws the density on a plane in Turbo colours, over a pale picture of the scene.

    A colour stands for the opacity of one step: dark blue for empty, dark red for opaque.

    Args:
        picture: (H, W, 3) in [0, 1].
        origin: (3,) of the rays of the picture's pixels, world units.
        directions: (H, W, 3) of these rays, unit length.
        box: (2, 3) within which the plane is drawn, world units.
        axis: World axis perpendicular to the plane.
        position: Position of the plane along that axis.
        optical_depth: Maps world positions (M, 3) to the density there times the length of a step, (M,).

    Returns:
        (H, W, 3) in [0, 1].
    """
    distance = (position - origin[axis]) / directions[..., axis]
    points = origin + directions * distance[..., None]
    others = [other for other in range(3) if other != axis]
    inside = ((points >= box[0]) & (points <= box[1]))[..., others].all(dim=-1)
    hit = inside & (distance > 0) & distance.isfinite()
    pale = torch.lerp(picture, torch.ones_like(picture), _PALE)
    opacity = -torch.expm1(-optical_depth(points[hit])).nan_to_num(nan=-1.0)
    hides = _EMPTY + (_OPAQUE - _EMPTY) * opacity[:, None]
    # The map is nearly black at 0, which no longer looks blue.
    pale[hit] = torch.lerp(pale[hit], turbo(0.08 + 0.92 * opacity), hides)
    return pale
