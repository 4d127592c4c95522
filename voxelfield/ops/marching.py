"""Placing samples along rays where space is occupied."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from voxelfield.foundation import constants
from voxelfield.foundation.checks import check_dense, check_field, check_tensor
from voxelfield.ops._packing import PackedSamples, check_capacity, empty_samples, parts_of
from voxelfield.ops._table import declare

# With fewer threads than this, memory latency dominates on a GPU, so each ray is split into segments that are marched
# in parallel.
_ENOUGH_THREADS = 1 << 16
_MAX_SEGMENTS_PER_RAY = 8


class OccupancyBits(NamedTuple):
    """The occupied cells of a box, one bit each; made by :func:`pack_occupancy`.

    Attributes:
        words: (ceil(X / 4), ceil(Y / 4), ceil(Z / 4)) int64; each word contains 4 x 4 x 4 cells.
        resolution: Numbers of cells X, Y, Z.
    """

    words: Tensor
    resolution: tuple[int, int, int]


def pack_occupancy(occupied: Tensor) -> OccupancyBits:
    """Packs a grid of bools into bits, in the layout that :func:`march_rays` reads.

    Args:
        occupied: (X, Y, Z) bool, the cells of a box.

    Returns:
        The same cells, 64 per word. Does not synchronise with the device.

    Raises:
        TypeError: ``occupied`` is not a bool tensor.
        ValueError: ``occupied`` does not have three dimensions, or has no cells.
    """
    check_field("occupied", occupied, ("X", "Y", "Z"), torch.bool)
    if occupied.numel() == 0:
        raise ValueError(f"occupied must have at least one cell, got shape {tuple(occupied.shape)}")
    x, y, z = occupied.shape
    return OccupancyBits(_pack_occupancy(occupied), (x, y, z))


def march_rays(
    origins: Tensor,
    directions: Tensor,
    near: Tensor,
    far: Tensor,
    occupied: Tensor | OccupancyBits,
    aabb: Tensor,
    step: float,
    offset: Tensor | None = None,
    *,
    capacity: int | None = None,
) -> PackedSamples:
    r"""Marches rays in equal steps and keeps the positions that lie in occupied cells.

    Ray r is tested at :math:`t_k = near_r + (k + offset_r) \cdot step` for :math:`t_k < far_r` and
    :math:`k < 2^{22}`; an empty cell, or an empty brick of 4 x 4 x 4 cells, is skipped in one stride (Amanatides and
    Woo 1987, restricted to these steps; Mueller et al. 2022). There are no samples outside the box, except where
    rounding moves a position out of it. Not differentiable.

    Args:
        origins: (R, 3) float32, world units. A ray that is not finite has no samples.
        directions: (R, 3) float32, unit length.
        near: (R,) float32, distance at which the ray starts.
        far: (R,) float32, distance at which it ends. ``far <= near`` yields no samples; with an infinite ``far`` the
            ray ends where it leaves the box.
        occupied: The cells of the box ``aabb``: (X, Y, Z) bool, or the result of :func:`pack_occupancy` for it.
        aabb: (2, 3) float32, lower and upper corner.
        step: Distance between samples, world units.
        offset: (R,) float32 in [0, 1), shift of each ray's samples in steps; 0.5 (midpoints) if None.
        capacity: Rows of the result. Rays are kept in order as long as all of their samples fit; the first ray whose
            samples do not fit and all rays after it get no samples. The call then does not synchronise with the device
            and can be captured in a CUDA graph. None: as many rows as there are samples, which synchronises once.

    Returns:
        The samples; ``dt`` is ``step``.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has the wrong shape or device, ``step`` is not positive and finite, or ``capacity`` is
            negative.
        NotImplementedError: An argument carries a tangent of forward-mode differentiation.
    """
    check_tensor("origins", origins, ("R", 3))
    check_field("aabb", aabb, (2, 3), torch.float32, "origins", origins)
    bits = occupied if isinstance(occupied, OccupancyBits) else pack_occupancy(occupied)
    check_bits(bits)
    check_capacity(capacity)
    offset = midpoints(near) if offset is None else offset
    segments_per_ray = _segments_per_ray(origins.shape[0], origins.device)
    walk = (origins, directions, near, far, offset, bits.words, bits.resolution, aabb, step, segments_per_ray)
    counts, step_ranges, sums = _count_ray_samples(*walk)
    rows = int(sums.sum()) if capacity is None else capacity
    return PackedSamples(*_place_ray_samples(*walk, counts, step_ranges, sums, rows))


def midpoints(near: Tensor) -> Tensor:
    """Returns the offsets with which the samples of each ray lie in the middle of their steps."""
    check_dense("near", near)
    return torch.full_like(near, 0.5)


def check_bits(bits: OccupancyBits) -> None:
    """Raises unless the words of bits fit their resolution."""
    expected = tuple(-(-cells // constants.BRICK_CELLS) for cells in bits.resolution)
    check_field("occupied.words", bits.words, expected, torch.int64, why=f" for {bits.resolution} cells")
    if bits.words.numel() == 0:
        raise ValueError(f"occupied must have at least one cell, got resolution {bits.resolution}")


def _segments_per_ray(rays: int, device: torch.device) -> int:
    """Returns the number of segments into which each ray is split; the samples do not depend on it."""
    segments = 1
    while device.type == "cuda" and segments < _MAX_SEGMENTS_PER_RAY and 2 * segments * rays <= _ENOUGH_THREADS:
        segments *= 2
    return segments


def _words(occupied: Tensor) -> Tensor:
    return occupied.new_empty([-(-cells // constants.BRICK_CELLS) for cells in occupied.shape], dtype=torch.int64)


def _counts(origins: Tensor, segments_per_ray: int) -> tuple[Tensor, Tensor, Tensor]:
    rays = origins.shape[0]
    segments = rays * segments_per_ray
    return (
        origins.new_empty(segments, dtype=torch.int32),
        origins.new_empty(constants.STEP_RANGES, segments, 2, dtype=torch.int32),
        origins.new_empty(parts_of(rays, segments_per_ray), dtype=torch.int64),
    )


_pack_occupancy = declare("pack_occupancy", _words)
_count_ray_samples = declare("count_ray_samples", _counts, public="march_rays")
_place_ray_samples = declare(
    "place_ray_samples",
    lambda origins, capacity: empty_samples(origins, origins.shape[0], capacity),
    public="march_rays",
)
