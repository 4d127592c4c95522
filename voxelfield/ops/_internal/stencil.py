"""The other ops of ``extension/stencil/``: gradients added to existing sums; points and gradients of sparse grids."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.foundation.checks import as_coordinates
from voxelfield.ops._grids import PADDINGS, Padding, Reduction, grid_options, grid_stencil
from voxelfield.ops._table import declare


@torch.no_grad()
def accumulate_trilinear_(
    sums: Sequence[Tensor],
    values: Tensor,
    points: Tensor,
    *,
    reduce: Reduction = "concat",
    padding: Padding = "border",
    align_corners: bool = True,
    slabs: Sequence[tuple[int, int]] | None = None,
    column: int = 0,
) -> None:
    """Adds the gradient of :func:`voxelfield.ops.sample_pyramid` in its grids to existing tensors, in one pass.

    Autograd would allocate and clear a gradient and then add it. This op adds 16-bit values to float32 sums directly
    and touches only the vertices around the points. With ``torch.use_deterministic_algorithms(True)`` it computes the
    gradient first, reproducibly, and then adds it. Not differentiable.

    Args:
        sums: 1 to 16 tensors (X_l, Y_l, Z_l, C_l), contiguous, float32 (float64 for float64 ``values``); changed in
            place. With ``slabs``, each holds only some planes along x of its grid.
        values: (N, sum of C_l), or (N, C) for ``"sum"``: the gradient in the samples; any floating dtype. It may have
            more columns, which are not read.
        points: (N, 3) positions of the samples, as for :func:`voxelfield.ops.sample_trilinear`. Points that are not
            finite add nothing.
        reduce: This and the other options are those that the samples were taken with.
        padding: See ``reduce``.
        align_corners: See ``reduce``.
        slabs: For each of ``sums`` its first plane along x, and the number of planes of the whole grid. Positions
            refer to the whole grid, and contributions to vertices in other planes are dropped. A tensor may have no
            planes. None means that ``sums`` are whole grids.
        column: The first column of ``values`` that belongs to ``sums``.

    Raises:
        ValueError: ``slabs`` is not as long as ``sums``.
        RuntimeError: A slab does not lie within its grid, or ``values`` has too few columns.
    """
    if slabs is not None and len(slabs) != len(sums):
        raise ValueError(f"slabs must be one for each of {len(sums)} sums, got {len(slabs)}")
    points = as_coordinates(points, values)
    add = reduce == "sum"
    if padding == "periodic" or (values.is_cuda and torch.are_deterministic_algorithms_enabled()):
        stencil = grid_stencil(*grid_options(padding, align_corners, "linear", add, False))
        of_grids = [(0, total.shape[0]) for total in sums] if slabs is None else slabs
        shapes = tuple((planes, *total.shape[1:]) for total, (_, planes) in zip(sums, of_grids, strict=True))
        columns = sums[0].shape[-1] if add else sum(total.shape[-1] for total in sums)
        own = values.narrow(1, column, columns)
        _library.ensure_loaded(values.device.type)  # splat is made for backward passes, before which an op has run
        fresh = stencil.splat(own.to(sums[0].dtype), points, shapes)
        for total, part, (first, _) in zip(sums, fresh, of_grids, strict=True):
            total.add_(part.narrow(0, first, total.shape[0]))
    else:
        options = (PADDINGS[padding], bool(align_corners), False)
        for group in [slice(i, i + 1) for i in range(len(sums))] if add else [slice(None)]:
            numbers = [] if slabs is None else list(itertools.chain.from_iterable(slabs[group]))
            _accumulate_trilinear_(list(sums[group]), values, points, *options, numbers, column)


_accumulate_trilinear_ = declare("accumulate_trilinear_")


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
