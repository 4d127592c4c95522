"""Which part of space cameras see."""

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
"""Cells along each axis beyond which the occupied cells are not divided."""


@torch.no_grad()
def visible_cells(
    field: Field,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    cameras: Cameras,
    chunk: int = 1 << 17,
) -> Tensor:
    """Marks the occupied cells, or parts of them, in which some pixel of some camera has a sample that shows.

    The parts, or groups of cells, that are judged as a whole are as small as the pixels' distance from one another
    permits: rays through the centres of coarse images' pixels must not pass by what lies between them.

    Args:
        field: What is seen.
        occupancy: Where there is something to sample, on the field's device.
        settings: How rays are sampled, and what is too faint to show.
        cameras: One ray is cast through the centre of each of their pixels.
        chunk: Rays at once, to bound memory.

    Returns:
        (X, Y, Z) bool, on the field's device: cells that divide the occupancy's box. Their number along an axis is a
        multiple of the occupancy's.
    """
    aabb, device = occupancy.aabb, occupancy.aabb.device
    cameras = cameras.to(device)
    shape = tuple(occupancy.occupied.shape)
    extent = (aabb[1] - aabb[0]).tolist()
    boxes: NestedBoxes | None = getattr(field, "boxes", None)
    if boxes is None:
        spacing = _pixel_spacing(cameras, aabb.mean(dim=0))
    else:
        # In units of a box; those of the smallest see pixels the farthest apart, the more so at its far corner.
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
        # What shows of a group may be narrower than a pixel, and missed, where its neighbour shows.
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
    """Marks the cells in which some of the cameras' pixels have a sample that shows.

    Args:
        field: What is seen.
        occupancy: Where there is something to sample, on the field's device.
        settings: How rays are sampled, and what is too faint to show.
        cameras: One ray is cast through the centre of each pixel that is looked at.
        shape: Numbers of cells along x, y and z of the occupancy's box.
        every: Look at one pixel of so many along each side of an image.
        chunk: Rays at once, to bound memory.

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
    """Yields positions (M, 3) of samples that show, in the frame of the occupancy."""
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
    """Returns the numbers (M, 3) of the cells of a box that positions lie in."""
    numbers = ((positions - aabb[0]) / (aabb[1] - aabb[0]) * cells).long()
    return numbers.clamp(cells.new_zeros(3), cells - 1)


def _pixel_spacing(cameras: Cameras, target: Tensor, beyond: float = 0.0) -> float:
    """Returns the largest distance between rays of neighbouring pixels, world units; 0 for no cameras.

    Args:
        cameras: The cameras.
        target: (3,) where it is measured, world units.
        beyond: How far behind that.
    """
    if len(cameras) == 0:
        return 0.0
    distance = (cameras.c2w[:, :3, 3] - target).norm(dim=-1) + beyond
    if cameras.lens is not None:
        return float((distance * cameras.pixel_angles()[:, 1]).amax())
    return float((distance / cameras.intrinsics[:, :2].amin(dim=-1)).amax())


def _scale(extent: float, cells: int, spacing: float) -> tuple[int, int]:
    """Returns into how many parts each cell along an axis is divided, and how many of these are judged together.

    However a square with the diagonal of a pixel as its side is turned, a pixel's centre lies in it.
    """
    fit = extent / cells / (math.sqrt(2) * spacing) if spacing > 0 else math.inf
    parts = int(max(1, min(fit, MAX_CELLS_PER_AXIS // cells)))
    return parts, 1 if fit >= 1 else min(cells, math.ceil(1 / fit))
