"""Points and gradients of sparse grids, which store only some of their blocks of vertices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops import _constants
from voxelfield.ops._checks import check_dtype, check_float32, check_same_device, check_tensor
from voxelfield.ops._no_derivative import hold_constant


def places_in_atlas(points: Tensor, blocks: Tensor, atlas: Sequence[int]) -> Tensor:
    """Returns where points of a sparse grid lie in the atlas of its blocks. Not differentiable.

    Args:
        points: (N, 3) float32 in the sparse grid's unit cube; those beyond its faces belong to the nearest one.
        blocks: (X, Y, Z) int32, contiguous: for each block its numbers along x, y and z in the atlas, ten bits each, x
            highest, or -1 for a block that is not stored.
        atlas: Vertices of the atlas along x, y and z, multiples of 8.

    Returns:
        (N, 3) float32 in the atlas's unit cube; NaN if the block is not stored or the point is not finite. Points are
        kept a thousandth of a cell away from the faces of their block.

    Raises:
        TypeError: A tensor has the wrong dtype.
        ValueError: A tensor has the wrong shape or device.
    """
    check_float32("points", points, ("N", 3), "points", points)
    check_tensor("blocks", blocks, ("X", "Y", "Z"))
    check_dtype("blocks", blocks, (torch.int32,))
    check_same_device("blocks", blocks, "points", points)
    side = _constants.BLOCK_VERTICES
    if len(atlas) != 3 or not all(0 < size <= _constants.MAX_ATLAS_VERTICES and size % side == 0 for size in atlas):
        raise ValueError(
            f"atlas must be three multiples of {side} up to {_constants.MAX_ATLAS_VERTICES}, got {list(atlas)}"
        )
    (points,) = hold_constant("places_in_atlas", points=points)
    _library.ensure_loaded(points.device.type)
    placed: Tensor = torch.ops.voxelfield.places_in_atlas(points, blocks, list(atlas))
    return placed


def share_copies_(sums: Tensor, copies: Tensor, begins: Tensor) -> None:
    """Replaces all copies of a vertex by their sum, in place.

    Args:
        sums: (X, Y, Z, C) float32, contiguous: an atlas, or its gradient.
        copies: (M,) int32 indices of the copies in ``sums``, grouped by vertex.
        begins: (V + 1,) int32: where the group of each vertex begins in ``copies``, and M.

    Raises:
        TypeError: A tensor has the wrong dtype.
        ValueError: A tensor has the wrong shape or device, or ``sums`` is not contiguous.
    """
    check_tensor("sums", sums, ("X", "Y", "Z", "C"))
    check_dtype("sums", sums, (torch.float32,))
    if not sums.is_contiguous():
        raise ValueError(f"sums must be contiguous, got strides {sums.stride()}")
    for name, index, size in (("copies", copies, "M"), ("begins", begins, "V")):
        check_tensor(name, index, (size,))
        check_dtype(name, index, (torch.int32,))
        check_same_device(name, index, "sums", sums)
    _library.ensure_loaded(sums.device.type)
    with torch.no_grad():
        torch.ops.voxelfield.share_copies_(sums, copies, begins)


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::places_in_atlas")
    def _(points: Tensor, blocks: Tensor, atlas: list[int]) -> Tensor:
        return torch.empty_like(points)

    @torch.library.register_fake("voxelfield::share_copies_")
    def _(sums: Tensor, copies: Tensor, begins: Tensor) -> None:
        return None
