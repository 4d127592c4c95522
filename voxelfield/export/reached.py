"""Which vertices of a grid rendering can read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reached_vertices(occupied: Tensor, occupied_box: Tensor, resolution: Sequence[int], aabb: Tensor) -> Tensor:
    """Marks the vertices whose values enter at some position in an occupied cell.

    Args:
        occupied: (X', Y', Z') bool, the cells in which rays are sampled.
        occupied_box: (2, 3) the box of these cells, world units.
        resolution: Vertices of the grid along x, y and z.
        aabb: (2, 3) the grid's box, world units.

    Returns:
        (X, Y, Z) bool on the device of ``occupied``, the same on every device. Positions that rounding puts a little
        outside of a cell count as inside.
    """
    reached = occupied
    low, high = (corner.tolist() for corner in occupied_box.double())
    begin, end = (corner.tolist() for corner in aabb.double())
    for axis, vertices in enumerate(resolution):
        cells = reached.shape[axis]
        spacing = (end[axis] - begin[axis]) / max(vertices - 1, 1)
        at = begin[axis] + spacing * torch.arange(vertices, dtype=torch.float64)
        # A vertex matters as far as the next ones. Beyond the faces, positions read the outermost vertices.
        to_cells = cells / (high[axis] - low[axis])
        first = ((at - spacing - low[axis]) * to_cells - 1e-3).floor().long()
        stop = ((at + spacing - low[axis]) * to_cells + 1e-3).floor().long() + 1
        first[0], stop[-1] = 0, cells
        reached = _any_between(reached, axis, first.clamp(0, cells), stop.clamp(0, cells))
    return reached


def _any_between(cells: Tensor, axis: int, first: Tensor, stop: Tensor) -> Tensor:
    """Tells along an axis whether any cell from first on, before stop, is set."""
    up_to = cells.cumsum(axis, dtype=torch.int32)
    up_to = torch.cat((torch.zeros_like(up_to.narrow(axis, 0, 1)), up_to), dim=axis)
    return up_to.index_select(axis, stop.to(cells.device)) > up_to.index_select(axis, first.to(cells.device))
