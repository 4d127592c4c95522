"""Selection of the visible samples of packed rays."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.foundation.checks import check_field, check_fraction, check_ray_offsets
from voxelfield.ops._compositing import per_sample
from voxelfield.ops._packing import PackedSamples, check_capacity, empty_samples, parts_of
from voxelfield.ops._table import declare
from voxelfield.ops.compositing import MIN_TRANSMITTANCE

MIN_WEIGHT = 1e-4
"""Default weight below which samples are dropped, in all ops that drop samples."""


def select_samples(
    density: Tensor,
    positions: Tensor,
    t: Tensor,
    dt: Tensor | float,
    ray_offsets: Tensor,
    *,
    min_transmittance: float = MIN_TRANSMITTANCE,
    min_weight: float = MIN_WEIGHT,
    capacity: int | None = None,
) -> PackedSamples:
    """Keeps the samples whose weight exceeds a threshold, packed again by ray. Not differentiable.

    Weights are those of :func:`composite`. A sample whose density is not finite is kept, so that it shows in its pixel.
    Rows of the input that belong to no ray are ignored.

    Args:
        density: (M,) float32, non-negative, per world unit of length; M below 2^31.
        positions: (M, 3) float32.
        t: (M,) float32, distance of each sample.
        dt: (M,) float32, length of each sample's interval, or one length for all samples.
        ray_offsets: As for :func:`composite`.
        min_transmittance: Transmittance below which a ray stops, in [0, 1]; 0 never stops it.
        min_weight: A sample is kept if its weight exceeds this; in [0, 1].
        capacity: As for :func:`march_rays`, for the samples that are kept.

    Returns:
        The samples that were kept. ``rays_kept`` counts input rays, including those without samples.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has the wrong shape or device, ``min_transmittance`` or ``min_weight`` is out of range,
            or ``capacity`` is negative; or, on the CPU, ``ray_offsets`` decrease or leave 0..M.
        NotImplementedError: An argument carries a tangent of forward-mode differentiation.
    """
    check_field("density", density, ("M",), torch.float32)
    count = density.shape[0]
    lengths: Tensor = per_sample(dt, density)
    check_field("positions", positions, (count, 3), torch.float32, "density", density)
    check_field("t", t, (count,), torch.float32, "density", density)
    check_field("dt", lengths, (count,), torch.float32, "density", density)
    ray_offsets = check_ray_offsets(ray_offsets, count, "density", density)
    check_fraction("min_transmittance", min_transmittance)
    check_fraction("min_weight", min_weight)
    check_capacity(capacity)
    kept, counts, sums = _count_visible_samples(density, lengths, ray_offsets, min_transmittance, min_weight)
    rows = int(sums.sum()) if capacity is None else capacity
    return PackedSamples(*_pack_visible_samples(positions, t, lengths, ray_offsets, kept, counts, sums, rows))


def _kept(density: Tensor, ray_offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rays = ray_offsets.shape[0] - 1
    kept, counts = (density.new_empty(size, dtype=torch.int32) for size in (density.shape, rays))
    return kept, counts, density.new_empty(parts_of(rays), dtype=torch.int64)


_count_visible_samples = declare("count_visible_samples", _kept, public="select_samples")
_pack_visible_samples = declare(
    "pack_visible_samples",
    lambda t, ray_offsets, capacity: empty_samples(t, ray_offsets.shape[0] - 1, capacity),
    public="select_samples",
)
