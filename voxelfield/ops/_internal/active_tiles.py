"""Lists the tiles of a grid's vertices that occupied cells can reach, for ops that visit only those vertices."""

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


@_library.when_loaded
def _register() -> None:
    torch.library.register_fake("voxelfield::active_tiles_", lambda *_: None)
