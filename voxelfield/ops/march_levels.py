"""Marching through boxes of cells that may overlap, in steps that may grow with the distance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.foundation.checks import check_at_least_one
from voxelfield.ops._packing import UNLIMITED, PackedSamples, check_capacity
from voxelfield.ops._table import declare


class LevelIntervals(NamedTuple):
    """The intervals of R rays, packed end to end.

    Attributes:
        begins: (M,) float32, distances along the rays, world units.
        ends: (M,) float32.
        ray_index: (M,) int64, never falling.
        ray_offsets: (R + 1,) int64.
        stops: (R,) float32, the distance at which each ray stopped; marching on from there continues its steps.
        rays_kept: (1,) int64: rays from this one on have no intervals because theirs did not fit. R if all did.
    """

    begins: Tensor
    ends: Tensor
    ray_index: Tensor
    ray_offsets: Tensor
    stops: Tensor
    rays_kept: Tensor


def march_levels(
    origins: Tensor,
    directions: Tensor,
    near: Tensor,
    far: Tensor,
    occupied: Tensor,
    aabbs: Tensor,
    step: float,
    cone_angle: float = 0.0,
    *,
    capacity: int | None = None,
) -> PackedSamples:
    r"""Marches rays through one or more boxes of cells, in steps that may grow with the distance.

    A position belongs to the first of the boxes that contains it. Steps begin at ``near``, each where the one before it
    ended, with the length :math:`\max(step, cone\_angle \cdot t)` (Mueller et al. 2022, appendix E.1); those whose
    midpoints lie in occupied cells become samples. Through a cell that is not occupied, and on the way to the first
    box, all steps have the length of the first one, as in nerfacc 0.5.3. Distances are summed in float32, so the steps
    are nerfacc's to the last bit wherever rounding does not move a midpoint across the border of a cell. A ray stops
    where a step is too short to change its distance. Not differentiable.

    Args:
        origins: (R, 3) float32, world units. A ray that is not finite has no samples.
        directions: (R, 3) float32, unit length.
        near: (R,) float32, distance at which the first step begins; add up to one ``step`` to shift samples at random.
        far: (R,) float32, distance before which the midpoints lie; may be infinite.
        occupied: (L, X, Y, Z) bool, the cells of L boxes.
        aabbs: (L, 6) float32, lower corner and upper corner of each box, world units.
        step: Shortest length of a step, world units; 0 for one sample for each occupied cell.
        cone_angle: Length of a step per distance from the origin.
        capacity: As for :func:`march_rays`.

    Returns:
        The samples, at the middles of their steps: a step is ``t - dt / 2`` to ``t + dt / 2``.

    Errors are those of :func:`march_rays`.
    """
    rays = (origins, directions, near, far)
    marched = level_intervals(*rays, occupied, aabbs, step, cone_angle, capacity=capacity)
    begins, ends, ray_index, ray_offsets, _, kept = marched
    spare = torch.arange(begins.shape[0], device=ray_offsets.device) >= ray_offsets[-1]
    t = ((begins + ends) / 2).masked_fill(spare, 0)
    dt = (ends - begins).masked_fill(spare, 0)
    # A ray of NaN follows the others, for the rows that belong to none of them.
    start, heading = (F.pad(x.detach(), (0, 0, 0, 1), value=torch.nan) for x in (origins, directions))
    along = ray_index.masked_fill(spare, near.shape[0])
    positions = torch.addcmul(start[along], heading[along], t[:, None])
    return PackedSamples(positions, t, dt, along.clamp(max=max(near.shape[0] - 1, 0)), ray_offsets, kept)


def level_intervals(
    origins: Tensor,
    directions: Tensor,
    near: Tensor,
    far: Tensor,
    occupied: Tensor,
    aabbs: Tensor,
    step: float,
    cone_angle: float = 0.0,
    max_count: int | None = None,
    *,
    capacity: int | None = None,
) -> LevelIntervals:
    """Marches as :func:`march_levels` does, and returns where steps begin and end, to the last bit.

    Other arguments are those of :func:`march_levels`; a ray stops after ``max_count`` intervals, if that is not None.
    """
    check_capacity(capacity)
    if max_count is not None:
        check_at_least_one("max_count", max_count)
    limit = UNLIMITED if max_count is None else max_count
    walk = (origins, directions, near, far, occupied, aabbs, step, cone_angle, limit)
    counts, stops = _count_level_intervals(*walk)
    ray_offsets = F.pad(counts.cumsum(0), (1, 0))
    kept = torch.full_like(ray_offsets[:1], counts.shape[0])
    if capacity is not None:
        kept = (ray_offsets[1:] <= capacity).sum(dim=0, keepdim=True)
        ray_offsets = torch.minimum(ray_offsets, ray_offsets.gather(0, kept))
    rows = int(ray_offsets[-1]) if capacity is None else capacity
    begins, ends, ray_index = _place_level_intervals(*walk, ray_offsets, rows)
    return LevelIntervals(begins, ends, ray_index, ray_offsets, stops, kept)


def _counts(near: Tensor) -> tuple[Tensor, Tensor]:
    return near.new_empty(near.shape, dtype=torch.int64), near.new_empty(near.shape)


def _intervals(near: Tensor, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    return near.new_empty(samples), near.new_empty(samples), near.new_empty(samples, dtype=torch.int64)


_count_level_intervals = declare("count_level_intervals", _counts, public="march_levels")
_place_level_intervals = declare("place_level_intervals", _intervals, public="march_levels")
