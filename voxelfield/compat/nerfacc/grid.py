"""Rays through boxes, and through the occupied cells of boxes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from voxelfield import ops
from voxelfield.compat.nerfacc.data_specs import RayIntervals, RaySamples
from voxelfield.foundation.checks import check_tensor
from voxelfield.ops.march_levels import level_intervals


@torch.no_grad()
def ray_aabb_intersect(
    rays_o: Tensor,
    rays_d: Tensor,
    aabbs: Tensor,
    near_plane: float = -math.inf,
    far_plane: float = math.inf,
    miss_value: float = math.inf,
) -> tuple[Tensor, Tensor, Tensor]:
    """Intersects rays with boxes (the slab method, Kay and Kajiya 1986).

    Args:
        rays_o: (n_rays, 3) origins, world units.
        rays_d: (n_rays, 3) unit directions.
        aabbs: (m, 6) lower corner and upper corner of each box.
        near_plane: Lower limit of the distances.
        far_plane: Upper limit of the distances.
        miss_value: Value of both distances where a ray misses a box, or a box is behind it.

    Returns:
        Distances (n_rays, m) at which rays enter and leave the boxes, and (n_rays, m) bool, whether they do.

    Raises:
        ValueError: An argument has the wrong shape.
    """
    for name, value, columns in (("rays_o", rays_o, 3), ("rays_d", rays_d, 3), ("aabbs", aabbs, 6)):
        check_tensor(name, value, ("*", columns))
    origins, directions = rays_o[:, None], rays_d[:, None]
    to_faces = (aabbs.view(1, -1, 2, 3) - origins[:, :, None]) / directions[:, :, None]
    # 0 / 0: the ray runs within the plane of a face, which therefore does not bound it.
    first = to_faces.amin(dim=2).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax(dim=-1)
    last = to_faces.amax(dim=2).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).amin(dim=-1)
    hits = (first <= last) & (last > 0) & (rays_o + rays_d).isfinite().all(dim=-1, keepdim=True)
    t_mins = first.clamp(min=near_plane).masked_fill(~hits, miss_value)
    t_maxs = last.clamp(max=far_plane).masked_fill(~hits, miss_value)
    return t_mins, t_maxs, hits


@torch.no_grad()
def traverse_grids(
    rays_o: Tensor,
    rays_d: Tensor,
    binaries: Tensor,
    aabbs: Tensor,
    near_planes: Tensor | None = None,
    far_planes: Tensor | None = None,
    step_size: float | None = 1e-3,
    cone_angle: float | None = 0.0,
    traverse_steps_limit: int | None = None,
    over_allocate: bool | None = False,
    rays_mask: Tensor | None = None,
    t_sorted: Tensor | None = None,
    t_indices: Tensor | None = None,
    hits: Tensor | None = None,
) -> tuple[RayIntervals, RaySamples, Tensor]:
    """Marches rays through the occupied cells of several boxes, of which the first one that contains a position counts.

    Args:
        rays_o: (n_rays, 3) float32 origins, world units.
        rays_d: (n_rays, 3) float32 unit directions.
        binaries: (m, X, Y, Z) bool, the occupied cells of each box.
        aabbs: (m, 6) float32 lower corner and upper corner of each box.
        near_planes: (n_rays,) float32, where rays begin; 0 if None.
        far_planes: (n_rays,) float32, where rays end; infinitely far if None.
        step_size: Shortest length of a step. 0, a negative number or None for one interval for each occupied cell.
        cone_angle: Length of a step per distance.
        traverse_steps_limit: The most samples of a ray; None, 0 or a negative number for no limit.
        over_allocate: Needs a ``traverse_steps_limit``, as in nerfacc, and has no effect: results contain samples only.
        rays_mask: (n_rays,) bool, the rays to march. The others have no samples and stop where they begin.
        t_sorted: Not needed: the boxes are intersected while rays are marched.
        t_indices: Not needed.
        hits: Not needed.

    Returns:
        The edges of the intervals, their midpoints, and (n_rays,) distances at which rays stopped, from which another
        call continues.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has the wrong shape or device, or a number is out of range.
    """
    limited = traverse_steps_limit is not None and traverse_steps_limit > 0
    if over_allocate and not limited:
        raise ValueError(f"traverse_steps_limit must be positive with over_allocate, got {traverse_steps_limit}")
    near = torch.zeros_like(rays_o[:, 0]) if near_planes is None else near_planes
    far = torch.full_like(rays_o[:, 0], math.inf) if far_planes is None else far_planes
    if rays_mask is not None:
        far = far.masked_fill(~rays_mask, -math.inf)
    step = max(step_size or 0.0, 0.0)
    limit = traverse_steps_limit if limited else None
    marched = level_intervals(rays_o, rays_d, near, far, binaries, aabbs, step, cone_angle or 0.0, limit)
    begins, ends, ray_index, offsets, stops, _ = marched
    samples = RaySamples(
        vals=(begins + ends) * 0.5,
        packed_info=torch.stack((offsets[:-1], offsets.diff()), dim=1),
        ray_indices=ray_index,
        is_valid=torch.ones_like(ray_index, dtype=torch.bool),
    )
    return _edges(begins, ends, ray_index, len(rays_o)), samples, stops


def _edges(begins: Tensor, ends: Tensor, ray_index: Tensor, n_rays: int) -> RayIntervals:
    """Returns the edges of packed intervals, with one edge where an interval begins at the end of another."""
    count = begins.shape[0]
    joins = torch.zeros_like(ray_index, dtype=torch.bool)
    joins[1:] = (begins[1:] == ends[:-1]) & (ray_index[1:] == ray_index[:-1])
    # The index of each interval's end among the edges.
    right = torch.arange(count, device=begins.device) + (~joins).cumsum(0)
    edges = int(right[-1]) + 1 if count else 0
    is_left = torch.zeros(edges, dtype=torch.bool, device=begins.device)
    is_right = torch.zeros_like(is_left)
    is_left[right - 1] = True
    is_right[right] = True
    vals, rays = begins.new_empty(edges), ray_index.new_empty(edges)
    vals[right - 1], vals[right] = begins, ends
    rays[right - 1], rays[right] = ray_index, ray_index
    return RayIntervals(vals, ops.pack_info(rays, n_rays), rays, is_left, is_right)
