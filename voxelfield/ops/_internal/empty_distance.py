"""Distances of empty cells to the nearest occupied one, with which rays cross empty space in long strides."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.ops._checks import check_dtype, check_tensor


@torch.no_grad()
def empty_distance(occupied: Tensor, max_distance: int = 32) -> Tensor:
    """Returns for each cell the distance in cells to the nearest occupied one, the largest along any axis.

    A cell at distance r is the middle of a cube of ``2r - 1`` empty cells along each axis, which a ray can leave in one
    stride (proximity clouds, Cohen and Sheffer 1994). Rendering accepts the result in place of ``occupied``.

    Args:
        occupied: (X, Y, Z) bool.
        max_distance: Larger distances are returned as this, 1 to 255. Each unit costs a pass over the grid.

    Returns:
        (X, Y, Z) uint8, 0 where occupied.

    Raises:
        TypeError: ``occupied`` is not a bool tensor.
        ValueError: ``occupied`` has another shape, or ``max_distance`` is out of range.
    """
    check_tensor("occupied", occupied, ("X", "Y", "Z"))
    check_dtype("occupied", occupied, (torch.bool,))
    if not 1 <= max_distance <= 255:
        raise ValueError(f"max_distance must lie in 1..255, got {max_distance}")
    near = occupied[None, None].float()
    distance = (~occupied).to(torch.uint8)
    for _ in range(max_distance - 1 if occupied.numel() else 0):
        near = F.max_pool3d(near, 3, stride=1, padding=1)
        distance += near[0, 0] == 0
    return distance
