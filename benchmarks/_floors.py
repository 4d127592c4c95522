"""Lower bounds on the bytes that a pass must move, counted for the actual inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from _formula import CORNERS, cells_of, corner_index, corner_indices
from torch import Tensor

_WARP = 32


class Floor(NamedTuple):
    """Bytes of one pass over grids (or cells).

    Attributes:
        forward: Points read, output written, each touched sector of the grids read once.
        backward: Points and values read, each gradient written once in full.
        two_pass: A backward pass that first zeroes the gradients: ``backward``, plus the touched sectors read and
            written.
        cached: Bytes that a forward pass requests from the cache: points, output, and each sector once per 32
            consecutive points.
        working_set: The touched sectors of the grids. (The last three do not apply to cells, which are read once each.)
    """

    forward: int
    backward: int
    two_pass: int | None = None
    cached: int | None = None
    working_set: int = 0


def _sectors_of(vertices: Tensor, vertex_bytes: int, granule: int) -> list[Tensor]:
    """Returns the sectors that each vertex covers; the last one is repeated for vertices that cover fewer."""
    first, last = vertices * vertex_bytes // granule, ((vertices + 1) * vertex_bytes - 1) // granule
    return [torch.minimum(first + step, last) for step in range((vertex_bytes - 1) // granule + 2)]


def _touched_bytes(grid: Tensor, points: Tensor, granule: int) -> int:
    resolution = grid.shape[:3]
    lower, _ = cells_of(points, resolution)
    touched = torch.zeros(resolution.numel(), dtype=torch.bool, device=grid.device)
    for corner in CORNERS:
        touched[corner_index(lower, resolution, corner)] = True
    vertices = touched.nonzero().squeeze(1)
    sectors = torch.zeros(-(-grid.nbytes // granule), dtype=torch.bool, device=grid.device)
    for covered in _sectors_of(vertices, grid.shape[3] * grid.element_size(), granule):
        sectors[covered] = True
    return int(sectors.sum()) * granule


def _requested_bytes(grid: Tensor, points: Tensor, granule: int) -> int:
    """Counts the sectors that each 32 consecutive points touch, which no sharing within a warp can avoid."""
    whole = len(points) // _WARP * _WARP
    lower, _ = cells_of(points[:whole], grid.shape[:3])
    vertices = corner_indices(lower, grid.shape[:3])
    covered = torch.cat(_sectors_of(vertices, grid.shape[3] * grid.element_size(), granule), dim=1)
    ordered = covered.view(whole // _WARP, -1).sort(dim=1).values
    distinct = ordered.shape[0] + int(torch.count_nonzero(ordered[:, 1:] != ordered[:, :-1]))
    return distinct * granule


def grids(sources: Sequence[Tensor], points: Tensor, values: Tensor, granule: int) -> Floor:
    """Counts the bytes of sampling grids (X, Y, Z, C) at (N, 3) points, and of the backward pass.

    Args:
        sources: The grids.
        points: The positions at which they are sampled.
        values: A tensor as large as the output; the incoming gradient has the same size.
        granule: Size in bytes of a memory transfer.

    Returns:
        The bytes of each kind.
    """
    streams = points.nbytes + values.nbytes
    touched = sum(_touched_bytes(grid, points, granule) for grid in sources)
    written = sum(grid.nbytes for grid in sources)
    requested = sum(_requested_bytes(grid, points, granule) for grid in sources)
    return Floor(streams + touched, streams + written, streams + written + 2 * touched, streams + requested, touched)


def cells(feats: Tensor, points: Tensor, values: Tensor) -> Floor:
    """Counts the bytes of interpolating cells and of the backward pass: each input and output once."""
    total = feats.nbytes + points.nbytes + values.nbytes
    return Floor(total, total)
