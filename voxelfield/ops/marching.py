"""Placing samples along rays where space is occupied."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops._checks import check_dtype, check_same_device, check_tensor


def march_rays(
    origins: Tensor,
    directions: Tensor,
    near: Tensor,
    far: Tensor,
    occupied: Tensor,
    aabb: Tensor,
    step: float,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Walks rays on a lattice of equal steps and keeps the positions that lie in occupied cells.

    Ray r is tested at :math:`t_k = near_r + (k + offset_r) \cdot step` for :math:`t_k < far_r`; empty cells are crossed
    in one stride (Amanatides and Woo 1987, on the lattice; Mueller et al. 2022). Not differentiable.

    Args:
        origins: (R, 3) float32, world units.
        directions: (R, 3) float32, unit length.
        near: (R,) float32, distance at which a ray starts.
        far: (R,) float32, distance at which it ends; finite. ``far <= near`` yields no samples.
        occupied: (X, Y, Z) bool, the cells of the box ``aabb``.
        aabb: (2, 3) float32, lower and upper corner.
        step: Distance between samples, world units.
        offset: (R,) float32 in [0, 1), shift of each ray's lattice in steps; 0.5 (midpoints) if None.

    Returns:
        positions (M, 3) and t (M,), float32, ordered by ray and then by distance; ray_index (M,) int64; ray_offsets
        (R + 1,) int64: the samples of ray r are ``ray_offsets[r]:ray_offsets[r + 1]``. M may be 0. Reading M back
        synchronises with the device once.

    Raises:
        TypeError: An argument is no tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or device, or ``step`` is not positive and finite.
    """
    check_tensor("origins", origins, ("R", 3))
    rays = origins.shape[0]
    if offset is None and isinstance(near, Tensor):
        offset = torch.full_like(near, 0.5)
    inputs = {"origins": origins, "directions": directions, "near": near, "far": far, "offset": offset, "aabb": aabb}
    shapes: dict[str, tuple[int | str, ...]] = {"origins": (rays, 3), "directions": (rays, 3), "aabb": (2, 3)}
    for name, value in inputs.items():
        check_tensor(name, value, shapes.get(name, (rays,)))
        assert isinstance(value, Tensor)
        check_dtype(name, value, (torch.float32,))
        check_same_device(name, value, "origins", origins)
    check_tensor("occupied", occupied, ("X", "Y", "Z"))
    check_dtype("occupied", occupied, (torch.bool,))
    check_same_device("occupied", occupied, "origins", origins)
    if occupied.numel() == 0:
        raise ValueError(f"occupied must have at least one cell, got shape {tuple(occupied.shape)}")
    limits = torch.finfo(torch.float32)
    if not limits.tiny <= step <= limits.max:  # the kernels march in float32
        raise ValueError(f"step must be a positive, finite distance, got {step}")
    _library.ensure_loaded(origins.device.type)
    walk = (origins, directions, near, far, offset, occupied, aabb, step)
    counts = torch.ops.voxelfield.count_ray_samples(*walk)
    ray_offsets = torch.zeros(rays + 1, dtype=torch.int64, device=origins.device)
    torch.cumsum(counts, 0, out=ray_offsets[1:])
    count = int(ray_offsets[-1])
    positions, t, ray_index = torch.ops.voxelfield.place_ray_samples(*walk, ray_offsets, count)
    return positions, t, ray_index, ray_offsets


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::count_ray_samples")
    def _(
        origins: Tensor,
        directions: Tensor,
        near: Tensor,
        far: Tensor,
        offset: Tensor,
        occupied: Tensor,
        aabb: Tensor,
        step: float,
    ) -> Tensor:
        return origins.new_empty(origins.shape[0], dtype=torch.int64)

    @torch.library.register_fake("voxelfield::place_ray_samples")
    def _(
        origins: Tensor,
        directions: Tensor,
        near: Tensor,
        far: Tensor,
        offset: Tensor,
        occupied: Tensor,
        aabb: Tensor,
        step: float,
        ray_offsets: Tensor,
        count: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return origins.new_empty(count, 3), origins.new_empty(count), origins.new_empty(count, dtype=torch.int64)
