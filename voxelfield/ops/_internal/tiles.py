"""Lists the tiles of a grid's vertices that occupied cells can reach, and copies listed tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops import _constants


def tiles_along(resolution: Sequence[int]) -> tuple[int, int, int]:
    """Returns the number of tiles that cover a grid's vertices along x, y and z; the last may extend past the grid."""
    x, y, z = resolution
    return -(-x // _constants.TILE_X), -(-y // _constants.TILE_Y), -(-z // _constants.TILE_Z)


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
        first ``count`` ids are those of the listed tiles, in ascending order; the other ids are undefined.
    """
    if out is None:
        total = math.prod(tiles_along(resolution))
        out = occupied.new_empty(total, dtype=torch.int32), occupied.new_empty(1, dtype=torch.int32)
    ids, count = out
    _library.ensure_loaded(occupied.device.type)
    torch.ops.voxelfield.active_tiles_(occupied, list(resolution), ids, count)
    return ids, count


@torch.no_grad()
def pack_tiles(grid: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """Copies the vertices of listed tiles of a grid into contiguous memory, for example to send them.

    Like :func:`unpack_tiles`, the call does not synchronise with the device and can be captured in a CUDA graph.

    Args:
        grid: (X, Y, Z, C) float32, float16 or bfloat16, contiguous; at most 4096, 4096 and 8192 vertices along x, y, z.
        ids: (K,) int32, contiguous, on the device of ``grid``: ids of tiles as :func:`active_tiles` lists them. An
            entry of -1 is unused.
        out: (K, 128, C), contiguous, of the dtype and device of ``grid``; receives the 4 x 4 x 8 vertices of each tile.
            What belongs to unused entries, or to vertices outside the grid, is not written.

    Returns:
        ``out``.
    """
    _library.ensure_loaded(grid.device.type)
    torch.ops.voxelfield.pack_tiles_(grid, ids, out)
    return out


@torch.no_grad()
def unpack_tiles(packed: Tensor, ids: Tensor, grid: Tensor) -> None:
    """Copies packed tiles to their vertices in a grid, in place. The arguments are those of :func:`pack_tiles`.

    Args:
        packed: (K, 128, C) vertices of the tiles.
        ids: (K,) int32, each id at most once. An entry of -1 is unused.
        grid: (X, Y, Z, C); only vertices of the listed tiles are written.
    """
    _library.ensure_loaded(grid.device.type)
    torch.ops.voxelfield.unpack_tiles_(packed, ids, grid)


@_library.when_loaded
def _register() -> None:
    for name in ("active_tiles_", "pack_tiles_", "unpack_tiles_"):
        torch.library.register_fake(f"voxelfield::{name}", lambda *_: None)
