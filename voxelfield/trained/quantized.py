"""Compact storage of features: their importance, and those that rendering can read, quantised by it and compressed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from voxelfield import ops
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.working_copies import Combination, sample_levels
from voxelfield.models.model import Model
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import visible_samples
from voxelfield.rendering.render import shaded

LARGEST_CODE = 127
"""Largest magnitude of a code, so that codes fit a signed byte."""

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

    Rays are divided evenly among the cameras, and their pixels are random. The result is (X, Y, Z, C) float32 for each
    level of the grid, on the field's device; zero for inactive levels.
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
    """Marks the vertices whose values contribute at some position in an occupied cell, or near one, (X, Y, Z) bool.

    Positions may be as far as ``margin`` from a cell of ``occupied`` (X', Y', Z') along each axis, world units; those
    that rounding puts a little outside of a cell count as inside. The result is the same on every device.
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


def steps_by_spread(levels: Sequence[Tensor], fraction: float) -> list[Tensor]:
    """Returns the step (C_l,) float32 of each channel of levels (N_l, C_l), a fraction of its standard deviation.

    In the level with the most vertices, it is ``fraction``; in one of n vertices, it is smaller by the square root of
    n's ratio to their number, because more samples read each.
    """
    largest = max(len(values) for values in levels)
    scales = [fraction * (len(values) / max(largest, 1)) ** 0.5 for values in levels]
    # A level without values has steps of zero.
    padded = [values.float() if len(values) else values.new_zeros(1, values.shape[1]).float() for values in levels]
    return [scale * values.std(dim=0, correction=0) for scale, values in zip(scales, padded, strict=True)]


def steps_by_importance(
    levels: Sequence[Tensor], importance: Sequence[Tensor], error: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Chooses steps so that rounding changes images by a given error, to which each channel contributes alike.

    For small independent errors, that takes the fewest bits. Features whose absence changes images less than the
    rounding of an average one become zero. ``error`` is the root of the mean squared error. Returns the features
    (N_l, C_l) and the step of each level's channels (C_l,) float32, infinite where nothing matters.
    """
    allowed = error**2 / max(sum(values.numel() for values in levels), 1)
    rounded = [x.where(w * x.float().square() >= allowed, 0) for x, w in zip(levels, importance, strict=True)]
    return rounded, [(12 * allowed / weight.mean(dim=0).clamp(min=1e-30)).sqrt() for weight in importance]


def quantize(values: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds finite features (N, C) to whole multiples of their channel's step; returns codes, int8, and steps.

    A step that is less than a 127th of the channel's largest feature is enlarged to that.
    """
    values = values.float()
    largest = values.abs().amax(dim=0) if len(values) else values.new_zeros(values.shape[1])
    # No step need be longer than the largest feature; infinite ones could not be stored.
    step = torch.maximum(torch.minimum(step, 4 * largest), largest / LARGEST_CODE)
    # A channel of zeros, or of numbers so small that their step is zero, has the code 0 throughout.
    codes = torch.where(step > 0, values / step, 0).nan_to_num_().round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.int8), step


def pack(values: Tensor) -> Tensor:
    """Compresses a tensor's bytes without loss to (B,) uint8 on the CPU.

    DEFLATE with its search for repetitions limited to runs of one byte: neighbouring features hardly predict one
    another, apart from runs of zeros. It is smaller than the whole search, and takes a hundredth of the time.
    """
    compressor = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    plain = values.cpu().contiguous().numpy().tobytes()
    return torch.frombuffer(bytearray(compressor.compress(plain) + compressor.flush()), dtype=torch.uint8)


def unpack(packed: Tensor, size: int) -> Tensor:
    """Returns the ``size`` bytes that :func:`pack` was given, (size,) uint8, in bounded memory.

    Raises:
        RuntimeError: The data are damaged, or contain another number of bytes.
    """
    # DEFLATE makes at most 1032 bytes of one, so a larger size is rejected before memory is allocated.
    if size > 1032 * packed.numel():
        raise RuntimeError(f"compressed data must be {size} bytes, but {packed.numel()} bytes cannot contain that many")
    decompressor = zlib.decompressobj()
    try:
        plain = decompressor.decompress(packed.numpy().data, size + 1)
    except zlib.error as error:
        raise RuntimeError(f"compressed data is damaged: {error}") from error
    if len(plain) != size or not decompressor.eof:
        found = f"more than {size}" if len(plain) > size else f"{len(plain)}"
        raise RuntimeError(f"compressed data must be {size} bytes, got {found}")
    return torch.from_numpy(np.frombuffer(bytearray(plain), dtype=np.uint8))
