"""Cells of space that cameras see."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.fields.field import Field, warp_of
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings, visible_samples
from voxelfield.rendering.occupancy import OccupancyGrid

MAX_CELLS_PER_AXIS = 256
"""Largest number of cells along each axis to which the occupied cells are subdivided."""


def ray_spacing(field: Field, aabb: Tensor, cameras: Cameras, *, farthest: bool = False) -> float:
    """Returns the largest distance between the rays of neighbouring pixels in a box; synchronises with the device.

    Args:
        field: The field.
        aabb: (2, 3) the box, in the coordinates of the field's samples, as the result is.
        cameras: At least one camera.
        farthest: Where the distance is measured if the field has no warp: in the corner of the box that is farthest
            from a camera, or in the middle of the box.
    """
    # The largest angle between the rays of neighbouring pixels of each camera, radians.
    flat = cameras.lens is None and cameras.rolling is None
    angles = 1 / cameras.intrinsics[:, :2].amin(dim=-1) if flat else cameras.pixel_angles()[:, 1]
    origins, angles = cameras.c2w[:, :3, 3].to(aabb.device), angles.to(aabb.device)
    warp = warp_of(field)
    if warp is not None:
        return warp.ray_spacing(origins, angles)
    distances = (origins - aabb.mean(dim=0)).norm(dim=-1)
    if farthest:
        distances = distances + (aabb[1] - aabb[0]).norm() / 2
    return float((distances * angles).max().clamp_min(torch.finfo(torch.float32).tiny))


def pixel_stride(field: Field, occupancy: OccupancyGrid, cameras: Cameras, across: int) -> int:
    """Returns the largest stride between pixels with which ``across`` rays still cross each cell side by side.

    That holds wherever the cell is in the box and however it is turned. The stride is at least 1, with which pixels may
    be too far apart for so many rays. Synchronises with the device.
    """
    fits = _rays_across_cells(occupancy, ray_spacing(field, occupancy.aabb, cameras, farthest=True))
    return max(1, int(min(fits) / across))


def _rays_across_cells(occupancy: OccupancyGrid, spacing: float) -> list[float]:
    """Returns how many rays of a spacing cross a cell side by side, at least, along x, y and z."""
    sizes = (occupancy.aabb[1] - occupancy.aabb[0]).tolist()
    # A square with a side of one pixel diagonal contains the centre of a pixel in any orientation.
    return [
        size / cells / (math.sqrt(2) * spacing) for size, cells in zip(sizes, occupancy.occupied.shape, strict=True)
    ]


@torch.no_grad()
def visible_cells(
    field: Field,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    cameras: Cameras,
    *,
    spacing: float | None = None,
    every: int = 1,
    chunk: int = 1 << 17,
) -> Tensor:
    """Marks the occupied cells, or parts of them, in which a pixel of some camera has a visible sample.

    Cells are split into parts as small as the spacing of the pixels allows: the rays through the centres of pixels must
    not miss a part that is visible between them. Where pixels are wider than cells, cells up to two pixels from such a
    sample are marked as well.

    Args:
        field: The field.
        occupancy: The occupied cells, on the field's device.
        settings: Sampling settings, including the visibility thresholds.
        cameras: One ray is cast through the centre of each of their pixels that is used.
        spacing: :func:`ray_spacing` of all cameras if these are only some of them.
        every: Stride between the pixels that are used, along each side of an image; does not affect the parts.
        chunk: Number of rays per chunk, to bound memory.

    Returns:
        (X, Y, Z) bool, on the field's device: a subdivision of the occupancy's box. The number of cells along each axis
        is a multiple of the occupancy's.
    """
    seen = occupancy.occupied
    if len(cameras) == 0:
        return torch.zeros_like(seen)
    if spacing is None:
        spacing = ray_spacing(field, occupancy.aabb, cameras)
    fits = _rays_across_cells(occupancy, spacing)
    for axis, fit in enumerate(fits):
        seen = seen.repeat_interleave(int(max(1, min(fit, MAX_CELLS_PER_AXIS // seen.shape[axis]))), axis)
    counts = count_visible_samples(field, occupancy, settings, cameras, seen.shape, every=every, chunk=chunk)
    shown = (counts > 0)[None].float()
    if min(fits) < 1:
        # The visible part of a cell may be narrower than a pixel and missed, while the rays beside it are not.
        for axis, (fit, cells) in enumerate(zip(fits, seen.shape, strict=True)):
            reach = [0, 0, 0]
            reach[axis] = min(2 * math.ceil(1 / fit) - 1, cells)
            shown = F.max_pool3d(shown, [2 * each + 1 for each in reach], stride=1, padding=reach)
    return seen & (shown[0] > 0)


@torch.no_grad()
def count_visible_samples(
    field: Field,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    cameras: Cameras,
    shape: Sequence[int],
    *,
    every: int = 1,
    chunk: int = 1 << 17,
) -> Tensor:
    """Counts the visible samples of the cameras' pixels in each of ``shape`` cells of the occupancy's box.

    The other arguments are as for :func:`visible_cells`; the result is (X, Y, Z) int32, on the field's device.
    """
    aabb, device = occupancy.aabb, occupancy.aabb.device
    cameras = cameras.to(device)
    counts = torch.zeros(tuple(shape), dtype=torch.int32, device=device)
    cells = torch.tensor(list(shape), device=device)
    for camera in range(len(cameras)):
        for rays in cameras.image_chunks(camera, field.aabb, chunk, every):
            positions = visible_samples(field, rays, occupancy, settings)[0].positions
            index = ((positions - aabb[0]) / (aabb[1] - aabb[0]) * cells).long()
            x, y, z = index.clamp(cells.new_zeros(3), cells - 1).unbind(-1)
            flat = (x * shape[1] + y) * shape[2] + z
            counts.view(-1).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return counts
