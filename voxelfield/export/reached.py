"""Marking the vertices of a grid that rendering can read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reached_vertices(occupied: Tensor, occupied_box: Tensor, resolution: Sequence[int], aabb: Tensor) -> Tensor:
    """Marks the vertices whose values contribute at some position in an occupied cell.

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
    # From the last axis to the first: the largest arrays are then copied in whole rows.
    for axis, vertices in reversed([*enumerate(resolution)]):
        cells = reached.shape[axis]
        spacing = (end[axis] - begin[axis]) / max(vertices - 1, 1)
        at = begin[axis] + spacing * torch.arange(vertices, dtype=torch.float64)
        # A vertex contributes up to its neighbours. Beyond the faces, positions read the outermost vertices.
        to_cells = cells / (high[axis] - low[axis])
        first = ((at - spacing - low[axis]) * to_cells - 1e-3).floor().long()
        stop = ((at + spacing - low[axis]) * to_cells + 1e-3).floor().long() + 1
        first[0], stop[-1] = 0, cells
        reached = _any_between(reached, axis, first.clamp(0, cells), stop.clamp(0, cells))
    return reached


def _any_between(cells: Tensor, axis: int, first: Tensor, stop: Tensor) -> Tensor:
    """Returns, along an axis, whether any cell in [first, stop) is set."""
    found = torch.zeros((), dtype=torch.bool, device=cells.device)
    # Where there are many vertices, there are few cells between them, and the other way round: this reads each cell
    # about twice, and makes nothing larger than its result.
    for offset in range(int((stop - first).max())):
        at = (first + offset).minimum(stop - 1).clamp(min=0)
        found = cells.index_select(axis, at.to(cells.device)) | found
    sizes = [-1 if each == axis else 1 for each in range(3)]
    return found & (stop > first).view(sizes).to(cells.device)
