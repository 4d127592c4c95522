"""Keeping the samples of packed rays that show."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops._checks import check_dtype, check_ray_offsets, check_same_device, check_tensor
from voxelfield.ops._packing import PackedSamples, check_capacity, empty_samples, parts_of


def select_samples(
    density: Tensor,
    positions: Tensor,
    t: Tensor,
    dt: Tensor,
    ray_offsets: Tensor,
    *,
    min_transmittance: float = 1e-4,
    min_weight: float = 1e-4,
    capacity: int | None = None,
) -> PackedSamples:
    """Keeps the samples whose weight exceeds a limit, packed again by ray. Not differentiable.

    Weights are those of :func:`voxelfield.ops.composite`. Rows of the input that belong to no ray are
    ignored.

    Args:
        density: (M,) float32, non-negative, per world unit of length; M below 2^31.
        positions: (M, 3) float32.
        t: (M,) float32, distance of each sample.
        dt: (M,) float32, length that each sample stands for.
        ray_offsets: As for :func:`voxelfield.ops.composite`; of samples of several rays, any is kept.
        min_transmittance: Where a ray stops; 0 never stops.
        min_weight: A sample is kept if its weight exceeds this; at least 0.
        capacity: Rows of the result, as for :func:`voxelfield.ops.march_rays`: rays are taken in order for as long as
            all that is kept of them fits, and the host never waits for the device. None: as many rows as samples are
            kept, which synchronises with the device once.

    Returns:
        The samples that were kept. ``rays_taken`` counts from the rays given here: a ray that had no samples counts.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has the wrong shape or device, or ``min_weight`` or ``capacity`` is negative; or, on
            the CPU, ``ray_offsets`` fall or leave 0..M.
    """
    check_tensor("density", density, ("M",))
    count = density.shape[0]
    shapes = {"density": (count,), "positions": (count, 3), "t": (count,), "dt": (count,)}
    for name, value in (("density", density), ("positions", positions), ("t", t), ("dt", dt)):
        check_tensor(name, value, shapes[name])
        check_dtype(name, value, (torch.float32,))
        check_same_device(name, value, "density", density)
    check_ray_offsets(ray_offsets, count, "density", density)
    if not min_weight >= 0:
        raise ValueError(f"min_weight must be at least 0, got {min_weight}")
    check_capacity(capacity)
    _library.ensure_loaded(density.device.type)
    with torch.no_grad():
        kept, counts, sums = torch.ops.voxelfield.count_visible_samples(
            density, dt, ray_offsets, min_transmittance, min_weight
        )
        rows = int(sums.sum()) if capacity is None else capacity
        packed = torch.ops.voxelfield.pack_visible_samples(positions, t, dt, ray_offsets, kept, counts, sums, rows)
    return PackedSamples(*packed)


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::count_visible_samples")
    def _(
        density: Tensor, dt: Tensor, ray_offsets: Tensor, min_transmittance: float, min_weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rays = ray_offsets.shape[0] - 1
        return (
            density.new_empty(density.shape, dtype=torch.int32),
            density.new_empty(rays, dtype=torch.int32),
            density.new_empty(parts_of(rays), dtype=torch.int64),
        )

    @torch.library.register_fake("voxelfield::pack_visible_samples")
    def _(
        positions: Tensor,
        t: Tensor,
        dt: Tensor,
        ray_offsets: Tensor,
        kept: Tensor,
        counts: Tensor,
        sums: Tensor,
        capacity: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return empty_samples(t, ray_offsets.shape[0] - 1, capacity)
