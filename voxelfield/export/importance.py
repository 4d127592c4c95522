"""Which features of a grid rendering can read, and how much each matters for the images that cameras take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield import ops
from voxelfield.grids.combination import Combination
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.working_copies import sample_levels
from voxelfield.models.model import Model
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import visible_samples
from voxelfield.rendering.render import shaded

# Rays at once, to bound memory.
_CHUNK = 1 << 17


def feature_importance(model: Model, cameras: Cameras, rays: int) -> list[Tensor]:
    r"""Estimates how much images change with each feature.

    A feature's importance is the mean, over the colour values of all images, of the squared derivative in the feature.
    If the features' errors are small and independent, the sum of importance times squared error over all features is
    the images' mean squared error.

    Derivatives are taken of one random combination of a pixel's colour channels, over a random background; the mean
    of its square is the sum of the channels' squares. They are taken in the features interpolated at a ray's samples,
    squared, and distributed to the surrounding vertices, as if samples were independent.

    Args:
        model: The field with its occupied cells and its sampling.
        cameras: Cameras among which the rays are divided evenly; their pixels are random.
        rays: Number of rays.

    Returns:
        (X, Y, Z, C) float32 for each level of the grid, on the field's device; zero for inactive levels.
    """
    field, grid, settings, device = model.field, model.field.grid, model.settings, model.device
    cameras = cameras.to(device)
    numbers = torch.arange(len(cameras), device=device).repeat_interleave(-(-rays // max(len(cameras), 1)))
    sizes = cameras.all_sizes().to(device, torch.float32)
    random = torch.Generator(device).manual_seed(0)  # the same run gives the same file
    sums = [torch.zeros(level.shape, device=device, requires_grad=True) for level in grid.levels]
    first, combination, sparse = (
        (grid.grids[0], grid.combination, grid.sparse_grids)
        if isinstance(grid, VoxelPyramid)
        else (grid, Combination(), [])
    )
    dense = len(sums) - len(sparse)
    for chosen in numbers.split(_CHUNK):
        pixels = torch.rand(len(chosen), 2, generator=random, device=device) * sizes[chosen]
        cast = cameras.rays(chosen, pixels, field.aabb)
        with torch.no_grad():
            samples, _ = visible_samples(field, cast, model.occupancy, settings)
            features = grid(samples.positions)
            points = first.to_unit(samples.positions)
        features.requires_grad_()
        with torch.enable_grad():
            density, rgb = field.decoder(features, cast.directions, samples.ray_index)
            limit = settings.min_transmittance
            seen = ops.composite(density, rgb, samples.t, samples.dt, samples.ray_offsets, min_transmittance=limit)
            behind = torch.rand(len(cast), 3, generator=random, device=device)
            emitted, _ = shaded(field, seen, rgb, samples, cast.directions)
            colour = emitted + (1 - seen.opacity)[:, None] * behind
            mixed = (colour * torch.randn(colour.shape, generator=random, device=device)).sum()
            (slope,) = torch.autograd.grad(mixed, features)
            active = sums[: grid.active]
            read = sample_levels(active, sparse[: len(active) - dense], points, combination, first.padding)
        squares = slope.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square()
        read.backward(squares[:, : read.shape[1]])
    for atlas, each in zip(sums[dense:], sparse, strict=True):
        each.share(atlas.grad)
    return [torch.zeros_like(x) if x.grad is None else x.grad / max(3 * len(numbers), 1) for x in sums]


def reached_vertices(
    occupied: Tensor, occupied_box: Tensor, resolution: Sequence[int], aabb: Tensor, margin: float = 0.0
) -> Tensor:
    """Marks the vertices whose values contribute at some position in an occupied cell, or near one.

    Args:
        occupied: (X', Y', Z') bool, the cells in which rays are sampled.
        occupied_box: (2, 3) the box of these cells, world units.
        resolution: Vertices of the grid along x, y and z.
        aabb: (2, 3) the grid's box, world units.
        margin: How far from an occupied cell positions may be, along each axis, world units.

    Returns:
        (X, Y, Z) bool on the device of ``occupied``, the same on every device. Positions that rounding puts a little
        outside of a cell count as inside.
    """
    reached = occupied
    low, high = (corner.tolist() for corner in occupied_box.double())
    begin, end = (corner.tolist() for corner in aabb.double())
    # From the last axis to the first: the largest arrays are then copied in whole rows.
    for axis, vertices in reversed([*enumerate(resolution)]):
        cells = reached.shape[axis]
        spacing = (end[axis] - begin[axis]) / max(vertices - 1, 1)
        at = begin[axis] + spacing * torch.arange(vertices, dtype=torch.float64)
        # A vertex contributes up to its neighbours. Beyond the faces, positions read the outermost vertices.
        to_cells, reach = cells / (high[axis] - low[axis]), spacing + margin
        first = ((at - reach - low[axis]) * to_cells - 1e-3).floor().long()
        stop = ((at + reach - low[axis]) * to_cells + 1e-3).floor().long() + 1
        first[0], stop[-1] = 0, cells
        reached = _any_between(reached, axis, first.clamp(0, cells), stop.clamp(0, cells))
    return reached


def _any_between(cells: Tensor, axis: int, first: Tensor, stop: Tensor) -> Tensor:
    """Returns, along an axis, whether any cell in [first, stop) is set."""
    found = torch.zeros((), dtype=torch.bool, device=cells.device)
    # Where there are many vertices, there are few cells between them, and the other way round: this reads each cell
    # about twice, and makes nothing larger than its result.
    for offset in range(int((stop - first).max())):
        at = (first + offset).minimum(stop - 1).clamp(min=0)
        found = cells.index_select(axis, at.to(cells.device)) | found
    sizes = [-1 if each == axis else 1 for each in range(3)]
    return found & (stop > first).view(sizes).to(cells.device)
