"""Cells of space that cameras see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.fields.field import Field, frame_of
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings, visible_samples
from voxelfield.rendering.occupancy import OccupancyGrid

MAX_CELLS_PER_AXIS = 256
"""Largest number of cells along each axis to which the occupied cells are subdivided."""


@torch.no_grad()
def visible_cells(
    field: Field,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    cameras: Cameras,
    chunk: int = 1 << 17,
) -> Tensor:
    """Marks the occupied cells, or parts of them, in which a pixel of some camera has a visible sample.

    Cells are split into parts, or merged into groups, that are as small as the spacing of the pixels allows: the rays
    through the centres of pixels must not miss a part or group that is visible between them.

    Args:
        field: The field.
        occupancy: The occupied cells, on the field's device.
        settings: Sampling settings, including the visibility thresholds.
        cameras: Cameras; one ray is cast through the centre of each of their pixels.
        chunk: Number of rays per chunk, to bound memory.

    Returns:
        (X, Y, Z) bool, on the field's device: a subdivision of the occupancy's box. The number of cells along each axis
        is a multiple of the occupancy's.
    """
    aabb, device = occupancy.aabb, occupancy.aabb.device
    cameras = cameras.to(device)
    shape = tuple(occupancy.occupied.shape)
    extent = (aabb[1] - aabb[0]).tolist()
    frame = frame_of(field)
    origins, angles = cameras.c2w[:, :3, 3], _largest_pixel_angles(cameras)
    if len(cameras) == 0:
        spacing = 0.0
    elif frame is None:
        spacing = float(((origins - aabb.mean(dim=0)).norm(dim=-1) * angles).max())
    else:
        spacing = frame.ray_spacing(origins, angles)
    scales = [_scale(length, cells, spacing) for length, cells in zip(extent, shape, strict=True)]
    sizes = [math.ceil(cells * parts / merged) for cells, (parts, merged) in zip(shape, scales, strict=True)]
    seen = torch.zeros(sizes, dtype=torch.bool, device=device)
    to_parts = torch.tensor([cells * parts for cells, (parts, _) in zip(shape, scales, strict=True)], device=device)
    merged = torch.tensor([merged for _, merged in scales], device=device)
    for positions in _positions(field, occupancy, settings, cameras, 1, chunk):
        x, y, z = (_numbers(positions, aabb, to_parts) // merged).unbind(-1)
        seen[x, y, z] = True
    if any(group > 1 for _, group in scales):
        # The visible part of a group may be narrower than a pixel and missed while a neighbouring group is visible.
        seen = F.max_pool3d(seen[None].float(), 3, stride=1, padding=1)[0] > 0
    occupied = occupancy.occupied
    for axis, (cells, (parts, group)) in enumerate(zip(shape, scales, strict=True)):
        seen = seen.repeat_interleave(group, axis).narrow(axis, 0, cells * parts)
        occupied = occupied.repeat_interleave(parts, axis)
    return seen & occupied


@torch.no_grad()
def shown_cells(
    field: Field,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    cameras: Cameras,
    shape: Sequence[int],
    *,
    every: int = 1,
    chunk: int = 1 << 17,
) -> Tensor:
    """Counts the visible samples of the cameras' pixels in each cell.

    Args:
        field: The field.
        occupancy: The occupied cells, on the field's device.
        settings: Sampling settings, including the visibility thresholds.
        cameras: Cameras; one ray is cast through the centre of each pixel that is used.
        shape: Number of cells along x, y and z of the occupancy's box.
        every: Stride between the pixels that are used, along each side of an image.
        chunk: Number of rays per chunk, to bound memory.

    Returns:
        (X, Y, Z) int32, on the field's device.
    """
    cameras = cameras.to(occupancy.aabb.device)
    shown = torch.zeros(tuple(shape), dtype=torch.int32, device=occupancy.aabb.device)
    cells = torch.tensor(list(shape), device=shown.device)
    _, y_cells, z_cells = shape
    for positions in _positions(field, occupancy, settings, cameras, every, chunk):
        x, y, z = _numbers(positions, occupancy.aabb, cells).unbind(-1)
        numbers, counts = ((x * y_cells + y) * z_cells + z).unique(return_counts=True)
        shown.view(-1)[numbers] += counts.to(torch.int32)
    return shown


def _positions(
    field: Field, occupancy: OccupancyGrid, settings: RenderSettings, cameras: Cameras, every: int, chunk: int
) -> Iterator[Tensor]:
    """Yields the positions (M, 3) of visible samples, in the frame of the occupancy."""
    device = occupancy.aabb.device
    for camera in range(len(cameras)):
        width, height = cameras.size(camera)
        rows = torch.arange(every // 2, height, every, device=device)
        columns = torch.arange(every // 2, width, every, device=device)
        y, x = torch.meshgrid(rows + 0.5, columns + 0.5, indexing="ij")
        pixels = torch.stack((x, y), dim=-1).view(-1, 2)
        for some in pixels.split(chunk):
            rays = cameras.rays(torch.full((len(some),), camera, device=device), some, field.aabb)
            yield visible_samples(field, rays, occupancy, settings)[0].positions


def _numbers(positions: Tensor, aabb: Tensor, cells: Tensor) -> Tensor:
    """Returns the indices (M, 3) of the cells of a box in which positions lie."""
    numbers = ((positions - aabb[0]) / (aabb[1] - aabb[0]) * cells).long()
    return numbers.clamp(cells.new_zeros(3), cells - 1)


def _largest_pixel_angles(cameras: Cameras) -> Tensor:
    """Returns the largest angle (N,) between the rays of neighbouring pixels of each camera, radians."""
    if cameras.lens is not None:
        return cameras.pixel_angles()[:, 1]
    return 1 / cameras.intrinsics[:, :2].amin(dim=-1)


def _scale(extent: float, cells: int, spacing: float) -> tuple[int, int]:
    """Returns the number of parts of each cell along an axis, and the number of parts that are merged into a group.

    A square with a side of one pixel diagonal contains the centre of a pixel in any orientation.
    """
    fit = extent / cells / (math.sqrt(2) * spacing) if spacing > 0 else math.inf
    parts = int(max(1, min(fit, MAX_CELLS_PER_AXIS // cells)))
    return parts, 1 if fit >= 1 else min(cells, math.ceil(1 / fit))
