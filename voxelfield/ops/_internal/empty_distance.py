"""Distances of empty cells to the nearest occupied one, with which rays cross empty space in long strides."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.ops._table import declare


def empty_distance(occupied: Tensor, max_distance: int = 32) -> Tensor:
    """Returns for each cell the distance in cells to the nearest occupied one, the largest along any axis.

    A cell at distance r is the middle of a cube of ``2r - 1`` empty cells along each axis, which a ray can leave in one
    stride (proximity clouds, Cohen and Sheffer 1994). Rendering accepts the result in place of ``occupied``.

    Args:
        occupied: (X, Y, Z) bool.
        max_distance: Larger distances are returned as this, 1 to 255.

    Returns:
        (X, Y, Z) uint8, 0 where occupied.
    """
    return _empty_distance(occupied, max_distance)


_empty_distance = declare("empty_distance", lambda occupied: occupied.new_empty(occupied.shape, dtype=torch.uint8))
