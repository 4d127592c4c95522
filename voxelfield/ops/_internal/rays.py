"""Distances to occupied cells, and samples along rays that nested boxes cut into pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield.foundation.autograd import hold_constant
from voxelfield.ops._packing import PackedSamples
from voxelfield.ops._table import declare
from voxelfield.ops.marching import OccupancyBits, march_rays, midpoints


def empty_distance(occupied: Tensor, max_distance: int = 32) -> Tensor:
    """Returns for each cell the distance in cells to the nearest occupied one, the largest along any axis.

    A cell at distance r is the middle of a cube of ``2r - 1`` empty cells along each axis, which a ray can leave in one
    stride (proximity clouds, Cohen and Sheffer 1994). Rendering accepts the result in place of ``occupied``.

    Args:
        occupied: (X, Y, Z) bool.
        max_distance: Larger distances are returned as this, 1 to 255.

    Returns:
        (X, Y, Z) uint8, 0 where occupied.
    """
    return _empty_distance(occupied, max_distance)


_empty_distance = declare("empty_distance", lambda occupied: occupied.new_empty(occupied.shape, dtype=torch.uint8))


@torch.no_grad()
def march_pieces(
    origins: Tensor,
    directions: Tensor,
    near: Tensor,
    far: Tensor,
    occupied: OccupancyBits,
    aabb: Tensor,
    step: float,
    boxes: Sequence[float],
    offset: Tensor | None = None,
    *,
    capacity: int | None = None,
) -> PackedSamples:
    """Marches rays through nested boxes; otherwise the same as :func:`march_rays`.

    Rays, ``offset`` and ``capacity`` are as for :func:`march_rays`. The cells, their box ``aabb`` and ``step`` are in
    warped coordinates; ``boxes`` is :attr:`voxelfield.warps.nested_boxes.NestedBoxes.op_arguments`.

    Returns:
        The samples of the R rays; positions, distances and lengths are in warped coordinates. Distances rise along a
        ray from one piece to the next.
    """
    offset = midpoints(near) if offset is None else offset
    (aabb,) = hold_constant("march_pieces", aabb=aabb)
    pieces = pieces_of(boxes)
    origins, directions, near, far = _cut_rays(origins, directions, near, far, offset, list(boxes), step)
    offset = offset.repeat_interleave(pieces)
    packed = march_rays(origins, directions, near, far, occupied, aabb, step, offset, capacity=capacity)
    offsets = packed.ray_offsets[::pieces].contiguous()
    whole = packed._replace(
        ray_index=packed.ray_index // pieces, ray_offsets=offsets, rays_kept=packed.rays_kept // pieces
    )
    return whole if capacity is None else _only_whole_rays(whole)


def _only_whole_rays(samples: PackedSamples) -> PackedSamples:
    """Drops the samples of the ray whose last pieces did not fit, without synchronising with the device."""
    end = samples.ray_offsets[samples.rays_kept]
    unused = torch.arange(len(samples.t), device=end.device) >= end
    last = max(len(samples.ray_offsets) - 2, 0)
    return PackedSamples(
        samples.positions.masked_fill(unused[:, None], math.nan),
        samples.t.masked_fill(unused, 0.0),
        samples.dt.masked_fill(unused, 0.0),
        samples.ray_index.masked_fill(unused, last),
        torch.minimum(samples.ray_offsets, end),
        samples.rays_kept,
    )


def pieces_of(boxes: Sequence[float]) -> int:
    """Returns the maximum number of pieces into which nested boxes cut a ray."""
    return 2 * int(boxes[7]) - 1


def _pieces(origins: Tensor, boxes: Sequence[float]) -> tuple[Tensor, ...]:
    rows = origins.shape[0] * pieces_of(boxes)
    return tuple(origins.new_empty(shape) for shape in ((rows, 3), (rows, 3), (rows,), (rows,)))


_cut_rays = declare("cut_rays", _pieces, public="march_pieces")
