"""Lists the tiles of a grid's vertices that occupied cells can reach, for ops that visit only those vertices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops import _constants
from voxelfield.ops._checks import check_dtype, check_same_device, check_tensor


def tile_shape() -> tuple[int, int, int]:
    """Returns the number of vertices of a tile along x, y and z."""
    return _constants.TILE_X, _constants.TILE_Y, _constants.TILE_Z


def tiles_along(resolution: Sequence[int]) -> tuple[int, int, int]:
    """Returns the number of tiles that cover a grid's vertices along x, y and z; the last may extend past the grid."""
    x, y, z = (-(-size // side) for size, side in zip(resolution, tile_shape(), strict=True))
    return x, y, z


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
        first ``count`` ids are those of the listed tiles, in any order; the other ids are undefined.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or device, or a size is out of range.
    """
    check_tensor("occupied", occupied, ("X", "Y", "Z"))
    check_dtype("occupied", occupied, (torch.bool,))
    if occupied.numel() == 0:
        raise ValueError(f"occupied must have at least one cell, got shape {tuple(occupied.shape)}")
    sizes = tuple(resolution)
    if len(sizes) != 3 or min(sizes) < 1 or max(tiles_along(sizes)) > _constants.MAX_TILES_ALONG:
        largest = tuple(side * _constants.MAX_TILES_ALONG for side in tile_shape())
        raise ValueError(f"resolution must be three numbers of vertices, from 1 to {largest}, got {sizes}")
    total = math.prod(tiles_along(sizes))
    if out is None:
        out = occupied.new_empty(total, dtype=torch.int32), occupied.new_empty(1, dtype=torch.int32)
    ids, count = out
    check_tiles(ids, count, "occupied", occupied)
    check_tensor("tile ids", ids, (total,), f" for {tiles_along(sizes)} tiles")
    _library.ensure_loaded(occupied.device.type)
    torch.ops.voxelfield.active_tiles_(occupied, sizes, ids, count)
    return ids, count


def check_tiles(ids: object, count: object, other_name: str, other: Tensor) -> None:
    """Raises unless the tensors are a list of tiles on the device of another tensor."""
    for name, value, shape in (("tile ids", ids, ("K",)), ("tile count", count, (1,))):
        check_tensor(name, value, shape)
        assert isinstance(value, Tensor)
        check_dtype(name, value, (torch.int32,))
        check_same_device(name, value, other_name, other)
        if not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {value.stride()}")


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::active_tiles_")
    def _(occupied: Tensor, resolution: list[int], ids: Tensor, count: Tensor) -> None:
        return None
