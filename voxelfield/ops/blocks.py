"""Lists of the blocks of a grid's vertices that are in use, for the ops that visit only those."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops import _constants
from voxelfield.ops._checks import check_dtype, check_same_device, check_tensor


def block_shape() -> tuple[int, int, int]:
    """Returns how many vertices a block has along x, y and z."""
    return _constants.TILE_X, _constants.TILE_Y, _constants.TILE_Z


def blocks_along(resolution: Sequence[int]) -> tuple[int, int, int]:
    """Returns how many blocks cover a grid's vertices along x, y and z; the last ones may reach beyond it."""
    x, y, z = (-(-size // side) for size, side in zip(resolution, block_shape(), strict=True))
    return x, y, z


def active_blocks(
    occupied: Tensor, resolution: Sequence[int], out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Lists the blocks of a grid's vertices that samples in occupied cells can touch.

    A block is 4 x 4 x 8 vertices along x, y, z; block (a, b, c) has the id ``(a << 20) + (b << 10) + c``. A sample
    touches the vertices of its grid cell. Cells count with their faces, so that the list also holds for a sample whose
    rounded position lies in the cell next door. Nothing is read back from the device; CUDA graphs can capture it.

    Args:
        occupied: (X, Y, Z) bool, cells that divide the grid's box evenly; any resolution.
        resolution: Numbers of the grid's vertices along x, y, z, the outermost on the box's faces; at most 4096, 4096
            and 8192.
        out: Ids and count to write into, as returned here for the same resolution.

    Returns:
        ids (K,) int32, K the number of all blocks, and count (1,) int32, on the device of ``occupied``. The first
        ``count`` ids are those of the blocks listed, in any order; the others mean nothing.

    Raises:
        TypeError: An argument is no tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or device, or a size is out of range.
    """
    check_tensor("occupied", occupied, ("X", "Y", "Z"))
    check_dtype("occupied", occupied, (torch.bool,))
    if occupied.numel() == 0:
        raise ValueError(f"occupied must have at least one cell, got shape {tuple(occupied.shape)}")
    sizes = tuple(resolution)
    if len(sizes) != 3 or min(sizes) < 1 or max(blocks_along(sizes)) > _constants.MAX_TILES_ALONG:
        most = tuple(side * _constants.MAX_TILES_ALONG for side in block_shape())
        raise ValueError(f"resolution must be three numbers of vertices, from 1 to {most}, got {sizes}")
    total = math.prod(blocks_along(sizes))
    if out is None:
        out = occupied.new_empty(total, dtype=torch.int32), occupied.new_empty(1, dtype=torch.int32)
    ids, count = out
    check_blocks(ids, count, "occupied", occupied)
    check_tensor("block ids", ids, (total,), f" for {blocks_along(sizes)} blocks")
    _library.ensure_loaded(occupied.device.type)
    torch.ops.voxelfield.active_tiles_(occupied, sizes, ids, count)
    return ids, count


def check_blocks(ids: object, count: object, other_name: str, other: Tensor) -> None:
    """Raises unless the tensors are a list of blocks on the device of another tensor."""
    for name, value, shape in (("block ids", ids, ("K",)), ("block count", count, (1,))):
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
