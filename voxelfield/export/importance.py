"""How much each feature of a grid matters for the images that cameras take."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield import ops
from voxelfield.fields.field import RadianceField
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.working_copies import sample_levels
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings, visible_samples
from voxelfield.rendering.occupancy import OccupancyGrid


def feature_importance(
    field: RadianceField,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    cameras: Cameras,
    rays: int,
    chunk: int = 1 << 17,
) -> list[Tensor]:
    r"""Estimates how much images change with each feature.

    A feature's importance is the mean over the images' numbers of their squared derivative in the feature. If the
    features' errors are small and independent, the sum of importance times squared error over all features is the
    images' mean squared error.

    Derivatives are taken of one random combination of a pixel's colour channels, over a random background; the mean of
    its square is the sum of the channels' squares. The derivatives in the features that were interpolated at a ray's
    samples are squared and then handed to the vertices around, as if samples were independent.

    Args:
        field: What is seen.
        occupancy: Where there is something to sample, on the field's device.
        settings: How rays are sampled.
        cameras: Rays are cast through random points of their images.
        rays: Number of rays, shared out evenly among the cameras, rounded up.
        chunk: Rays at once, to bound memory.

    Returns:
        (X, Y, Z, C) float32 for each level of the grid, on the field's device; zero for levels that are off.
    """
    grid, device = field.grid, field.aabb.device
    cameras = cameras.to(device)
    numbers = torch.arange(len(cameras), device=device).repeat_interleave(-(-rays // max(len(cameras), 1)))
    sizes = cameras.all_sizes().to(device, torch.float32)
    random = torch.Generator(device).manual_seed(0)  # files of the same run do not differ by chance
    sums = [torch.zeros(level.shape, device=device, requires_grad=True) for level in grid.levels]
    one, reduce = (grid.grids[0], grid.reduce) if isinstance(grid, VoxelPyramid) else (grid, "concat")
    sparse = grid.sparse_grids if isinstance(grid, VoxelPyramid) else []
    dense = len(grid.levels) - len(sparse)
    for some_of in numbers.split(chunk):
        at = torch.rand(len(some_of), 2, generator=random, device=device) * sizes[some_of]
        some = cameras.rays(some_of, at, field.aabb)
        with torch.no_grad():
            samples, _ = visible_samples(field, some, occupancy, settings)
            features = grid(samples.positions)
            points = one.to_unit(samples.positions)
        features.requires_grad_()
        with torch.enable_grad():
            density, rgb = field.decoder(features, some.directions, samples.ray_index)
            seen = ops.composite(
                density,
                rgb,
                samples.t,
                samples.dt,
                samples.ray_offsets,
                min_transmittance=settings.min_transmittance,
            )
            behind = torch.rand(len(some), 3, generator=random, device=device)
            colour = seen.rgb + (1 - seen.opacity)[:, None] * behind
            mixed = (colour * torch.randn(colour.shape, generator=random, device=device)).sum()
            (slope,) = torch.autograd.grad(mixed, features)
            active = sums[: grid.active]
            read = sample_levels(active, sparse[: len(active) - dense], points, reduce, one.padding)
        squares = slope.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square()
        read.backward(squares[:, : read.shape[1]])
    for atlas, each in zip(sums[dense:], sparse, strict=True):
        each.share(atlas.grad)
    return [torch.zeros_like(x) if x.grad is None else x.grad / max(3 * len(numbers), 1) for x in sums]
