"""Lists the tiles of a grid's vertices that occupied cells can reach, and copies vertices that a step has changed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield.foundation import constants
from voxelfield.ops._table import declare


def tiles_along(resolution: Sequence[int]) -> tuple[int, int, int]:
    """Returns the number of tiles that cover a grid's vertices along x, y and z; the last may extend past the grid."""
    x, y, z = resolution
    return -(-x // constants.TILE_X), -(-y // constants.TILE_Y), -(-z // constants.TILE_Z)


def active_tiles(
    occupied: Tensor, resolution: Sequence[int], out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Lists the tiles of a grid's vertices that a sample in an occupied cell can read.

    A tile is 4 x 4 x 8 vertices along x, y, z; tile (a, b, c) has the id ``(a << 20) + (b << 10) + c``. A sample reads
    the eight vertices around it. Cells include their faces, so the list is also right for a sample whose position was
    rounded into the neighbouring cell. The call does not synchronise with the device and can be captured in a CUDA
    graph.

    Args:
        occupied: (X, Y, Z) bool, cells that divide the grid's box evenly; any resolution.
        resolution: Numbers of the grid's vertices along x, y, z, the outermost on the box's faces; at most 4096, 4096
            and 8192.
        out: The ids and the count of an earlier call for the same resolution, to be overwritten; None allocates them.

    Returns:
        ids (K,) int32, where K is the number of all tiles, and count (1,) int32, on the device of ``occupied``. The
        first ``count`` ids are the listed tiles, in ascending order; the other ids are undefined.
    """
    if out is None:
        total = math.prod(tiles_along(resolution))
        out = occupied.new_empty(total, dtype=torch.int32), occupied.new_empty(1, dtype=torch.int32)
    ids, count = out
    _active_tiles_(occupied, list(resolution), ids, count)
    return ids, count


def touched_vertices(grad: Tensor, table: Tensor, ids: Tensor | None = None, *, every: bool = False) -> None:
    """Lists the vertices of a grid whose gradient is not zero, by tiles.

    Like the functions that copy these vertices, the call does not synchronise with the device and can be captured in a
    CUDA graph.

    Args:
        grad: (X, Y, Z, C) float32, contiguous.
        table: (K, 5) int32, contiguous, on the device of ``grad``; written to. A row belongs to a tile: a bit for each
            of its 128 vertices in four numbers, and how many bits are set.
        ids: (K,) int32, contiguous: ids of tiles as :func:`active_tiles` lists them; an entry of -1 is unused. None:
            a tile is 128 vertices that follow each other in memory, from the first vertex on.
        every: List all vertices of the tiles, whatever their gradient.
    """
    _touched_vertices_(grad, ids, every, table)


def pack_vertices(grid: Tensor, table: Tensor, packed: Tensor, ids: Tensor | None = None, *, first: int = 0) -> None:
    """Copies listed vertices of a grid into rows, for example to send them.

    Args:
        grid: (X, Y, Z, C) float32, float16 or bfloat16, contiguous.
        table: (K, 5) int32, contiguous, as :func:`touched_vertices` writes it, but the last number of a row is the
            number of vertices in all rows before it.
        packed: (R, C), contiguous, of the dtype and device of ``grid``; receives the listed vertices in their order, as
            far as there are rows.
        ids: As for :func:`touched_vertices`.
        first: Without ``ids``, the index of the vertex with which the first tile begins.
    """
    _pack_vertices_(grid, ids, first, table, packed)


def unpack_vertices(packed: Tensor, table: Tensor, grid: Tensor, ids: Tensor | None = None, *, first: int = 0) -> None:
    """Copies rows back to the listed vertices of a grid, in place; arguments as for :func:`pack_vertices`."""
    _unpack_vertices_(packed, ids, first, table, grid)


_active_tiles_ = declare("active_tiles_", public="active_tiles")
_touched_vertices_ = declare("touched_vertices_", public="touched_vertices")
_pack_vertices_ = declare("pack_vertices_", public="pack_vertices")
_unpack_vertices_ = declare("unpack_vertices_", public="unpack_vertices")
