"""Points and gradients of sparse grids, which store only some of their blocks of vertices."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from voxelfield.ops._table import declare


def atlas_coordinates(points: Tensor, blocks: Tensor, atlas: Sequence[int]) -> Tensor:
    """Returns where points of a sparse grid lie in the atlas of its blocks, without derivatives.

    Args:
        points: (N, 3) float32 in the sparse grid's unit cube; those beyond its faces belong to the nearest one.
        blocks: (X, Y, Z) int32, contiguous: for each block its numbers along x, y and z in the atlas, ten bits each, x
            highest, or -1 for a block that is not stored.
        atlas: Vertices of the atlas along x, y and z, multiples of 8.

    Returns:
        (N, 3) float32 in the atlas's unit cube; NaN if the block is not stored or the point is not finite. Points stay
        a thousandth of a cell away from the faces of their block.
    """
    return _atlas_coordinates(points, blocks, list(atlas))


def sum_duplicates_(sums: Tensor, copies: Tensor, begins: Tensor, touched: Tensor | None = None) -> None:
    """Replaces all copies of a vertex by their sum, in place.

    Args:
        sums: (X, Y, Z, C) float32, contiguous: an atlas, or its gradient.
        copies: (M,) int32 indices of the copies in ``sums``, grouped by vertex.
        begins: (V + 1,) int32: where the group of each vertex begins in ``copies``, and M.
        touched: (K, 5) int32, contiguous: the table of the vertices of ``sums`` that are not zero, as
            :func:`voxelfield.ops._internal.optim.touched_vertices` writes it without ids. Only their groups are read,
            and all copies of these are added to the table. None reads all groups.
    """
    _sum_duplicates_(sums, copies, begins, touched)


_atlas_coordinates = declare("atlas_coordinates", lambda points: points.new_empty(points.shape))
_sum_duplicates_ = declare("sum_duplicates_")
