"""Marching through boxes of cells that may overlap, in steps that may grow with the distance."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield import _library
from voxelfield.ops._checks import (
    check_at_least_one,
    check_field,
    check_float32,
    check_not_negative,
    check_rays,
)
from voxelfield.ops._no_derivative import hold_constant


class RayIntervals(NamedTuple):
    """The intervals of R rays, packed end to end.

    Attributes:
        begins: (M,) float32, distances along the rays, world units.
        ends: (M,) float32.
        ray_index: (M,) int64, never falling.
        ray_offsets: (R + 1,) int64.
        stops: (R,) float32, the distance at which each ray stopped; marching on from there continues its steps.
    """

    begins: Tensor
    ends: Tensor
    ray_index: Tensor
    ray_offsets: Tensor
    stops: Tensor


def march_levels(
    origins: Tensor,
    directions: Tensor,
    near: Tensor,
    far: Tensor,
    occupied: Tensor,
    aabbs: Tensor,
    step: float,
    cone_angle: float = 0.0,
    max_count: int | None = None,
) -> RayIntervals:
    r"""Marches rays through one or more boxes of cells, and returns the steps whose midpoints lie in occupied cells.

    A position belongs to the first of the boxes that contains it. Steps begin at ``near``, each where the one before it
    ended, with the length :math:`\max(step, cone\_angle \cdot t)` (Mueller et al. 2022, appendix E.1). Through a cell
    that is not occupied, and on the way to the first box, all steps have the length of the first one, as in nerfacc
    0.5.3. Distances are summed in float32, so the steps are nerfacc's to the last bit wherever rounding does not move a
    midpoint across the border of a cell. A ray stops where a step is too short to change its distance. Not
    differentiable.

    Args:
        origins: (R, 3) float32, world units. A ray that is not finite has no intervals.
        directions: (R, 3) float32, unit length.
        near: (R,) float32, distance at which the first step begins.
        far: (R,) float32, distance before which the midpoints lie; may be infinite.
        occupied: (L, X, Y, Z) bool, the cells of L boxes.
        aabbs: (L, 6) float32, lower corner and upper corner of each box, world units.
        step: Shortest length of a step, world units; 0 for one interval for each occupied cell.
        cone_angle: Length of a step per distance from the origin.
        max_count: The most intervals of a ray, which stops after them. None for no limit.

    Returns:
        The intervals. Synchronises with the device once.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has the wrong shape or device, or a number is out of range.
        NotImplementedError: An argument carries a tangent of forward-mode differentiation.
    """
    check_rays(origins, directions, near, far, None)
    check_field("occupied", occupied, ("L", "X", "Y", "Z"), torch.bool, "origins", origins)
    check_float32("aabbs", aabbs, (occupied.shape[0], 6), "origins", origins)
    if occupied[:1].numel() == 0 and occupied.shape[0] > 0:
        raise ValueError(f"occupied must have at least one cell in each box, got shape {tuple(occupied.shape)}")
    check_not_negative("step", step)
    check_not_negative("cone_angle", cone_angle)
    if max_count is not None:
        check_at_least_one("max_count", max_count)
    rays = {"origins": origins, "directions": directions, "near": near, "far": far}
    origins, directions, near, far, aabbs = hold_constant("march_levels", **rays, aabbs=aabbs)
    _library.ensure_loaded(origins.device.type)
    limit = max_count if max_count is not None else _NO_LIMIT
    walk = (origins, directions, near, far, occupied, aabbs, float(step), float(cone_angle), limit)
    counts, stops = torch.ops.voxelfield.count_level_intervals(*walk)
    ray_offsets = F.pad(counts.cumsum(0), (1, 0))
    rows = int(ray_offsets[-1])
    begins, ends, ray_index = torch.ops.voxelfield.place_level_intervals(*walk, ray_offsets, rows)
    return RayIntervals(begins, ends, ray_index, ray_offsets, stops)


_NO_LIMIT = (1 << 63) - 1


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::count_level_intervals")
    def _(origins: Tensor, directions: Tensor, near: Tensor, *walk: Any) -> tuple[Tensor, Tensor]:
        return near.new_empty(near.shape, dtype=torch.int64), near.new_empty(near.shape)

    @torch.library.register_fake("voxelfield::place_level_intervals")
    def _(origins: Tensor, directions: Tensor, near: Tensor, *walk: Any) -> tuple[Tensor, Tensor, Tensor]:
        *_, samples = walk
        return near.new_empty(samples), near.new_empty(samples), near.new_empty(samples, dtype=torch.int64)
