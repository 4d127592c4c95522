"""Cells of space that cameras see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.fields.field import Field
from voxelfield.grids.nested_boxes import NestedBoxes
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
    boxes: NestedBoxes | None = getattr(field, "boxes", None)
    if boxes is None:
        spacing = _pixel_spacing(cameras, aabb.mean(dim=0))
    else:
        # In units of a box, the pixel spacing is largest in the smallest box, and there at its far corner.
        spacing = _pixel_spacing(cameras, field.aabb.mean(dim=0), math.sqrt(3) * boxes.unit) / boxes.unit
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
    """Marks the cells in which some of the cameras' pixels have a visible sample.

    Args:
        field: The field.
        occupancy: The occupied cells, on the field's device.
        settings: Sampling settings, including the visibility thresholds.
        cameras: Cameras; one ray is cast through the centre of each pixel that is used.
        shape: Number of cells along x, y and z of the occupancy's box.
        every: Stride between the pixels that are used, along each side of an image.
        chunk: Number of rays per chunk, to bound memory.

    Returns:
        (X, Y, Z) bool, on the field's device.
    """
    cameras = cameras.to(occupancy.aabb.device)
    shown = torch.zeros(tuple(shape), dtype=torch.bool, device=occupancy.aabb.device)
    cells = torch.tensor(list(shape), device=shown.device)
    for positions in _positions(field, occupancy, settings, cameras, every, chunk):
        x, y, z = _numbers(positions, occupancy.aabb, cells).unbind(-1)
        shown[x, y, z] = True
    return shown


def _positions(
    field: Field, occupancy: OccupancyGrid, settings: RenderSettings, cameras: Cameras, every: int, chunk: int
) -> Iterator[Tensor]:
    """Yields the positions (M, 3) of visible samples, in the frame of the occupancy."""
    device = occupancy.aabb.device
    rows = torch.arange(every // 2, cameras.height, every, device=device)
    columns = torch.arange(every // 2, cameras.width, every, device=device)
    y, x = torch.meshgrid(rows + 0.5, columns + 0.5, indexing="ij")
    pixels = torch.stack((x, y), dim=-1).view(-1, 2)
    for camera in range(len(cameras)):
        for some in pixels.split(chunk):
            rays = cameras.rays(torch.full((len(some),), camera, device=device), some, field.aabb)
            yield visible_samples(field, rays, occupancy, settings)[0].positions


def _numbers(positions: Tensor, aabb: Tensor, cells: Tensor) -> Tensor:
    """Returns the indices (M, 3) of the cells of a box in which positions lie."""
    numbers = ((positions - aabb[0]) / (aabb[1] - aabb[0]) * cells).long()
    return numbers.clamp(cells.new_zeros(3), cells - 1)


def _pixel_spacing(cameras: Cameras, target: Tensor, beyond: float = 0.0) -> float:
    """Returns the largest distance between the rays of neighbouring pixels, world units; 0 without cameras.

    Args:
        cameras: The cameras.
        target: (3,) point at which the distance is measured, world units.
        beyond: Additional distance behind that point, world units.
    """
    if len(cameras) == 0:
        return 0.0
    distance = (cameras.c2w[:, :3, 3] - target).norm(dim=-1) + beyond
    if cameras.lens is not None:
        return float((distance * cameras.pixel_angles()[:, 1]).amax())
    return float((distance / cameras.intrinsics[:, :2].amin(dim=-1)).amax())


def _scale(extent: float, cells: int, spacing: float) -> tuple[int, int]:
    """Returns the number of parts of each cell along an axis, and the number of parts that are merged into a group.

    A square with a side of one pixel diagonal contains the centre of a pixel in any orientation.
    """
    fit = extent / cells / (math.sqrt(2) * spacing) if spacing > 0 else math.inf
    parts = int(max(1, min(fit, MAX_CELLS_PER_AXIS // cells)))
    return parts, 1 if fit >= 1 else min(cells, math.ceil(1 / fit))
