"""Sparse grids given as lists of coordinates with features, sampled trilinearly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from voxelfield.foundation.checks import (
    FLOATING,
    check_at_least_one,
    check_choice,
    check_field,
    check_has_values,
    check_tensor,
    coordinate_dtype,
    widen_positions,
)
from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError, shown
from voxelfield.ops._grids import grid_size
from voxelfield.ops.cells import trilinear_interpolate
from voxelfield.ops.grid import sample_trilinear

Missing = Literal["zeros", "renormalize"]
_VERTICES, _CELLS = 8, 7  # of a block along each axis, as in voxelfield.grids.sparse_grid
# Voxels of the atlas for each point, below which the atlas is filled with features, which takes a pass over it.
_VOXELS_PER_POINT = 32
_CORNERS = tuple(itertools.product((0, 1), repeat=3))  # in the order of trilinear_interpolate


class VoxelIndex:
    """Where the voxels of a list are: built once for a list, and used by every :func:`sample_voxels`.

    Blocks of 8 x 8 x 8 voxels, of which neighbours share the outermost ones, lie side by side in an atlas, as those of
    :class:`voxelfield.grids.sparse_grid.SparseGrid` do; blocks without voxels are left out. The index takes 4 bytes for
    each voxel of a block, and for each block of the whole grid, and 8 for each place of a listed voxel.

    Args:
        coords: (N, 3) x, y, z of each voxel, or (N, 4) with its element of a batch first; integers, all different, on
            CPU or CUDA.
        resolution: Voxels along x, y and z of the whole grid, one int for all.
        batch: Elements of the batch, for (N, 4); None is one more than the largest in ``coords``.

    Attributes:
        count: N.
        resolution: Voxels along x, y and z.
        batch: Elements of the batch, or None without one.
        exists: (B, X', Y', Z') bool, which blocks have voxels; B is 1 without a batch. The first vertex of the first
            block is one voxel before the first voxel, because features fall to zero there.
        rows: (8 A, 8 B', 8 C') int32, the row of each voxel of the atlas, N where there is none.
        filled: (K,) int64, the places in the atlas, flattened, that have a row; up to eight for each voxel of the list.

    Raises:
        TypeError: ``coords`` are no integers.
        ValueError: ``coords`` have another shape, lie outside of the grid, or are not all different.
    """

    def __init__(self, coords: Tensor, resolution: int | Sequence[int], batch: int | None = None) -> None:
        check_field("coords", coords, ("...",), (torch.int64, torch.int32, torch.int16, torch.uint8))
        check_has_values("coords", coords)
        if batch is not None:
            check_at_least_one("batch", batch)
        batched = coords.dim() == 2 and coords.shape[1] == 4
        check_tensor("coords", coords, ("N", 4 if batched or batch is not None else 3))
        self.count, self.resolution, device = len(coords), grid_size("resolution", resolution), coords.device
        element = coords[:, 0].long() if batched else coords.new_zeros(self.count, dtype=torch.int64)
        self.batch = int(element.max()) + 1 if batched and batch is None and self.count else batch
        elements = 1 if self.batch is None else self.batch
        if elements * math.prod(self.resolution) > 1 << 40:
            raise ArgumentValueError(f"batch must be of grids of at most 2^40 voxels in all, got {shown(self.batch)}")
        place, limits = coords[:, -3:].long(), torch.tensor(self.resolution, device=device)
        outside = ((place < 0) | (place >= limits)).any(dim=1) | (element < 0) | (element >= elements)
        if bool(outside.any()):
            wrong = coords[outside.nonzero()[0, 0]].tolist()
            raise ArgumentValueError(f"coords must lie in a grid of {self.resolution}, batch {batch}, got {wrong}")
        # Vertex i + 1 is voxel i, and cell c lies between the vertices c and c + 1.
        blocks = [(place + torch.tensor(corner, device=device)) // _CELLS for corner in _CORNERS]
        shape = [n // _CELLS + 1 for n in self.resolution]
        self.exists = torch.zeros(elements, *shape, dtype=torch.bool, device=device)
        for block in blocks:
            self.exists.index_put_((element, *block.unbind(1)), torch.tensor(True, device=device))
        number = self.exists.view(-1).cumsum(0, dtype=torch.int32) - 1
        self._numbers = torch.where(self.exists.view(-1), number, -1)
        self.atlas = atlas_blocks(int(self.exists.sum()))
        size = [_VERTICES * n for n in self.atlas]
        self.rows = torch.full(size, self.count, dtype=torch.int32, device=device)
        rows = torch.arange(self.count, dtype=torch.int32, device=device)
        for block in blocks:
            vertex = self._first_vertex(self._number(block, element)) + place + 1 - _CELLS * block
            self.rows[tuple(vertex.T)] = rows
        if bool((self.rows[tuple(vertex.T)] != rows).any()):
            raise ArgumentValueError("coords must be all different, got a voxel twice")
        self.filled = (self.rows.view(-1) != self.count).nonzero()[:, 0]

    def _number(self, block: Tensor, element: Tensor) -> Tensor:
        """Returns the numbers (M,) of blocks (M, 3) in the order of the atlas, -1 for those that do not exist."""
        flat = element
        for axis, size in enumerate(self.exists.shape[1:]):
            flat = flat * size + block[:, axis]
        return self._numbers.index_select(0, flat)

    def _first_vertex(self, number: Tensor) -> Tensor:
        """Returns the first vertices (M, 3) of blocks in the atlas."""
        _, y, z = self.atlas
        number = number.long()
        return _VERTICES * torch.stack((number // (y * z), number // z % y, number % z), dim=1)

    def locate(self, cell: Tensor, element: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first vertices (M, 3) of cells in the atlas, int64, and which cells have a block, (M,).

        Args:
            cell: (M, 3) floating numbers: one more than the indices of the first voxels around points; NaN is none.
            element: (M,) int64, the elements of the batch.
        """
        limits = torch.tensor(self.resolution, device=cell.device)
        inside = ((cell >= 0) & (cell <= limits)).all(dim=1) & (element >= 0) & (element < len(self.exists))
        index = torch.where(inside[:, None], cell, 0.0).long()
        number = self._number(index // _CELLS, torch.where(inside, element, 0))
        inside = inside & (number >= 0)
        return self._first_vertex(number.clamp(min=0)) + index % _CELLS, inside


def atlas_blocks(count: int) -> tuple[int, int, int]:
    """Returns the number of blocks of an atlas along x, y and z, which is nearly a cube."""
    count = max(count, 1)
    x = math.ceil(count ** (1 / 3) - 1e-9)
    y = math.ceil(math.sqrt(count / x) - 1e-9)
    return x, y, math.ceil(count / (x * y))


def sample_voxels(
    features: Tensor,
    index: VoxelIndex,
    points: Tensor,
    element: Tensor | None = None,
    *,
    missing: Missing = "zeros",
    align_corners: bool = False,
) -> Tensor:
    """Samples features at the voxels of a list by trilinear interpolation.

    Args:
        features: (N, C) features of the voxels, in the order of the coordinates of ``index``; float32, float64, float16
            or bfloat16, on the device of the index.
        index: The voxels.
        points: (..., 3) x, y, z in the unit cube of the grid, or (B, ..., 3) for a batch; float32, or float64 for
            float64 ``features``. Those that are not finite yield zeros and receive no gradient.
        element: (...) int64: for an index with a batch, the element of each of the points (..., 3). None: points have
            the batch as their first dimension.
        missing: What neighbours that are not in the list are: ``"zeros"``, also beyond the grid, or left out, with
            the weights of the others divided by their sum (``"renormalize"``). Without any neighbour, the result is 0.
        align_corners: Where the unit cube ends. False: half a voxel beyond the centres of the outermost voxels. True:
            at them.

    Returns:
        (..., C) in the dtype of ``features``; sums of 16-bit features and gradients are computed in float32.
        Differentiable twice with respect to ``features`` and ``points``.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or is on another device, or ``missing`` is unknown.
        NotImplementedError: A third derivative is requested.
    """
    if not isinstance(index, VoxelIndex):
        raise ArgumentTypeError(f"index must be a VoxelIndex, got {type(index).__name__}")
    check_choice("missing", missing, get_args(Missing))
    check_field("features", features, (index.count, "C"), FLOATING, "index", index.rows)
    check_field("points", points, ("...",), FLOATING, "features", features)
    batched, wide = index.batch is not None and element is None, coordinate_dtype(features.dtype)
    if points.dim() < 1 + batched or points.shape[-1] != 3 or (batched and len(points) != index.batch):
        wanted = f"({index.batch}, ..., 3)" if batched else "(..., 3)"
        raise ArgumentValueError(f"points must have shape {wanted}, got {tuple(points.shape)}")
    where = widen_positions("points", points, wide).to(wide).reshape(math.prod(points.shape[:-1]), 3)
    if element is not None:
        check_field("element", element, tuple(points.shape[:-1]), torch.int64, "features", features)
        number = element.reshape(-1)
    else:
        number = torch.arange(index.batch or 1, device=points.device)
        number = number.repeat_interleave(len(where) // (index.batch or 1))
    limits = torch.tensor(index.resolution, dtype=wide, device=points.device)
    place = where * (limits - 1) + 1 if align_corners else where * limits + 0.5
    cell = place.detach().floor()
    vertex, inside = index.locate(cell, number)
    columns = features.to(wide)
    if missing == "renormalize":
        columns = torch.cat((columns, torch.ones_like(columns.sum(dim=1, keepdim=True))), dim=1)
    if _VOXELS_PER_POINT * len(where) > index.rows.numel():
        # Not one look-up for all places of the atlas: its gradient would sort them on CUDA.
        grid = columns.new_zeros(index.rows.numel(), columns.shape[1])
        grid.index_put_((index.filled,), columns.index_select(0, index.rows.view(-1)[index.filled]))
        grid = grid.view(*index.rows.shape, columns.shape[1])
        sampled = sample_trilinear(grid, _in_atlas(place - cell, vertex, inside, index.rows.shape))
    else:
        table = torch.cat((columns, torch.zeros_like(columns.sum(dim=0, keepdim=True))))  # a row for what is missing
        steps = torch.tensor(_CORNERS, device=points.device)
        x, y, z = (vertex[:, None] + steps).unbind(-1)
        rows = torch.where(inside[:, None], index.rows[x, y, z], index.count)
        corners = table.index_select(0, rows.reshape(8 * len(rows))).view(len(rows), 8, table.shape[1])
        sampled = trilinear_interpolate(corners, 2 * (place - cell) - 1)
    if missing == "renormalize":
        sampled, weight = sampled.split((features.shape[1], 1), dim=1)
        sampled = torch.where(weight > 0, sampled / torch.where(weight > 0, weight, 1.0), 0.0)
    return sampled.to(features.dtype).view(*points.shape[:-1], features.shape[1])


def _in_atlas(fraction: Tensor, vertex: Tensor, inside: Tensor, size: Sequence[int]) -> Tensor:
    """Returns positions (M, 3) in the unit cube of an atlas, NaN where there is no block."""
    cells = torch.tensor(size, dtype=fraction.dtype, device=fraction.device) - 1
    # Rounding must not move a point into the cell between two blocks.
    margin = 2 * torch.finfo(fraction.dtype).eps * max(size)
    kept = fraction + (fraction.detach().clamp(margin, 1 - margin) - fraction.detach())
    return torch.where(inside[:, None], (vertex + kept) / cells, math.nan)
