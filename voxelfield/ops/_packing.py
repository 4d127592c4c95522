"""Samples packed by ray, and helpers shared by the ops that pack them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.ops import _constants
from voxelfield.ops._errors import shown


class PackedSamples(NamedTuple):
    """Samples of R rays, packed end to end.

    The samples of ray r are ``ray_offsets[r]:ray_offsets[r + 1]``, near to far. With a fixed capacity there may be rows
    past ``ray_offsets[-1]``, which belong to no ray: their position is NaN, where grids have neither value nor
    gradient, ``t`` and ``dt`` are 0, and ``ray_index`` is R - 1.

    Attributes:
        positions: (M, 3) float32, world frame.
        t: (M,) float32, distance along the ray, world units.
        dt: (M,) float32, length of each sample's interval, world units.
        ray_index: (M,) int64, non-decreasing.
        ray_offsets: (R + 1,) int64.
        rays_kept: (1,) int64: rays from this one on have no samples because theirs did not fit. R if all did.
    """

    positions: Tensor
    t: Tensor
    dt: Tensor
    ray_index: Tensor
    ray_offsets: Tensor
    rays_kept: Tensor


# Beyond this, sizes in bytes may overflow.
_MAX_ROWS = 1 << 40


def check_capacity(capacity: object) -> None:
    """Raises unless ``capacity`` is None or a number of rows."""
    if capacity is None:
        return
    if not isinstance(capacity, int) or isinstance(capacity, bool):
        raise TypeError(f"capacity must be an int or None, got {type(capacity).__name__}")
    if not 0 <= capacity <= _MAX_ROWS:
        limit = "at least 0" if capacity < 0 else "at most 2^40"
        raise ValueError(f"capacity must be a number of samples, {limit}, got {shown(capacity)}")


def parts_of(rays: int, segments_per_ray: int = 1) -> int:
    """Returns the number of parts into which packing divides the segments of all rays; each part has its own sum."""
    return max(1, -(-rays * segments_per_ray // _part_length(rays, segments_per_ray)))


def sums_of_parts(counts: Tensor) -> Tensor:
    """Returns the sum of each part (int64) of the counts (R,) of rays of one segment each."""
    rays = counts.shape[0]
    length = _part_length(rays, 1)
    return F.pad(counts.long(), (0, parts_of(rays) * length - rays)).view(-1, length).sum(dim=1)


def _part_length(rays: int, segments_per_ray: int) -> int:
    unit = max(_constants.PART_RAYS * segments_per_ray, _constants.PART_SEGMENTS)
    return unit * max(1, -(-rays * segments_per_ray // (unit * _constants.MAX_PARTS)))


def empty_samples(like: Tensor, rays: int, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the fields of PackedSamples for a compiler: shapes and dtypes without values."""
    return (
        like.new_empty(capacity, 3, dtype=torch.float32),
        like.new_empty(capacity, dtype=torch.float32),
        like.new_empty(capacity, dtype=torch.float32),
        like.new_empty(capacity, dtype=torch.int64),
        like.new_empty(rays + 1, dtype=torch.int64),
        like.new_empty(1, dtype=torch.int64),
    )
