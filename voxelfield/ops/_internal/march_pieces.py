"""Samples along rays that nested boxes cut into pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield.foundation.autograd import hold_constant
from voxelfield.ops._packing import PackedSamples
from voxelfield.ops._table import declare
from voxelfield.ops.marching import OccupancyBits, march_rays, midpoints


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


def world_distances(boxes: Sequence[float], samples: PackedSamples, origins: Tensor, directions: Tensor) -> Tensor:
    """Returns the distances (M,) of samples in warped coordinates from their rays' origins, world units.

    ``origins`` (R, 3) are in world units, ``directions`` (R, 3) of unit length; boxes as for :func:`march_pieces`.
    """
    centre, half, (ratio, count, pitch, _) = boxes[:3], boxes[3:6], boxes[6:]
    box = torch.round(samples.positions[:, 0] / pitch).clamp(0, count - 1)
    in_box = torch.cat((samples.positions[:, :1] - pitch * box[:, None], samples.positions[:, 1:]), dim=-1)
    scaled = in_box * (max(half) * ratio**box)[:, None]
    # Python numbers instead of a tensor, because a copy from the host cannot be captured in a CUDA graph.
    world = torch.stack([along + middle for along, middle in zip(scaled.unbind(-1), centre, strict=True)], dim=-1)
    rays = samples.ray_index
    return ((world - origins[rays]) * directions[rays]).sum(dim=-1)


def pieces_of(boxes: Sequence[float]) -> int:
    """Returns the maximum number of pieces into which nested boxes cut a ray."""
    return 2 * int(boxes[7]) - 1


def _pieces(origins: Tensor, boxes: Sequence[float]) -> tuple[Tensor, ...]:
    rows = origins.shape[0] * pieces_of(boxes)
    return tuple(origins.new_empty(shape) for shape in ((rows, 3), (rows, 3), (rows,), (rows,)))


_cut_rays = declare("cut_rays", _pieces, public="march_pieces")
