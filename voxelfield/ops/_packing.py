"""Samples packed by ray, and helpers shared by the ops that pack them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from voxelfield.foundation import constants
from voxelfield.foundation.checks import check_field, check_index, check_ray_offsets, check_tensor, is_readable
from voxelfield.foundation.errors import shown


class PackedSamples(NamedTuple):
    """Samples of R rays, packed end to end.

    The samples of ray r are ``ray_offsets[r]:ray_offsets[r + 1]``, near to far. With a fixed capacity there may be rows
    past ``ray_offsets[-1]``, which belong to no ray: their position is NaN, where grids have neither value nor
    gradient, ``t`` and ``dt`` are 0, and ``ray_index`` is R - 1, or 0 without rays.

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


def offsets_from_ray_index(ray_index: Tensor, rays: int) -> Tensor:
    """Returns where the samples of each ray begin, from the ray of each sample.

    Args:
        ray_index: (M,) int64 or int32, in 0..rays - 1, never falling. Checked on the CPU only, because that would
            synchronise on CUDA.
        rays: The number of rays R.

    Returns:
        (R + 1,) int64 ``ray_offsets``: the samples of ray r are ``ray_offsets[r]:ray_offsets[r + 1]``.

    Raises:
        TypeError: ``ray_index`` is not a tensor of integers, or ``rays`` is not an int.
        ValueError: ``ray_index`` has the wrong shape, or ``rays`` is negative or above 2^40; or, on the CPU,
            ``ray_index`` falls or leaves 0..rays - 1.
    """
    check_field("ray_index", ray_index, ("M",), (torch.int64, torch.int32))
    check_count("rays", rays, "rays")
    check_index("ray_index", ray_index, rays, f"as there are {rays} rays")
    if is_readable(ray_index) and bool((ray_index[1:] < ray_index[:-1]).any()):
        raise ValueError("ray_index must not decrease: sort the samples by ray")
    return torch.searchsorted(ray_index.long().contiguous(), torch.arange(rays + 1, device=ray_index.device))


def pack_info(ray_index: Tensor, rays: int) -> Tensor:
    """Returns the first sample of each ray and the number of its samples, which is nerfacc's form of ray offsets.

    Arguments and errors are those of :func:`offsets_from_ray_index`.

    Returns:
        (R, 2) int64 of ``[first, count]``. ``ray_offsets`` are the first column, followed by M.
    """
    offsets = offsets_from_ray_index(ray_index, rays)
    return torch.stack((offsets[:-1], offsets.diff()), dim=1)


def ray_index_from_offsets(ray_offsets: Tensor, samples: int) -> Tensor:
    """Returns the ray of each sample.

    Args:
        ray_offsets: (R + 1,) int64 or int32, as for :func:`composite`.
        samples: The number of samples M. It is an argument because reading ``ray_offsets[-1]`` would synchronise.

    Returns:
        (M,) int64, never falling. Rows past ``ray_offsets[-1]``, which belong to no ray, get the last ray, as in
        :class:`PackedSamples`.

    Raises:
        TypeError: ``ray_offsets`` is not a tensor of integers, or ``samples`` is not an int.
        ValueError: ``ray_offsets`` has the wrong shape, or ``samples`` is negative or above 2^40; or, on the CPU,
            ``ray_offsets`` fall or leave 0..samples.
    """
    check_count("samples", samples, "samples")
    ray_offsets = check_ray_offsets(ray_offsets, samples, "samples", ray_offsets)
    rows = torch.arange(samples, device=ray_offsets.device)
    index = torch.searchsorted(ray_offsets[1:].contiguous(), rows, right=True)
    return index.clamp(max=max(ray_offsets.shape[0] - 2, 0))


def pack_equal_rays(name: str, values: Tensor, **others: Any) -> tuple[Any, ...]:
    """Packs rays of equally many samples, which need no ``ray_offsets``: ``values`` (R, S), and ``others``.

    ``rgb`` is (R, S, C) and ``dt`` may be one length. Returns all as (R * S, ...), and the offsets (R + 1,).
    """
    check_tensor(name, values, ("R", "S"), " without ray_offsets")
    packed = [values.flatten()]
    for other, x in others.items():
        if other != "dt" or (isinstance(x, Tensor) and x.dim() > 0):
            check_tensor(other, x, (*values.shape, "C") if other == "rgb" else tuple(values.shape))
            x = x.flatten(0, 1)
        packed.append(x)
    rays, samples = values.shape
    return *packed, samples * torch.arange(rays + 1, device=values.device)


# Beyond this, sizes in bytes may overflow.
_MAX_ROWS = 1 << 40
UNLIMITED = 2**63 - 1  # what kernels take for no limit


def check_capacity(capacity: object) -> None:
    """Raises unless ``capacity`` is None or a number of rows."""
    if capacity is not None:
        check_count("capacity", capacity, "samples", "an int or None")


def check_count(name: str, count: object, what: str, kind: str = "an int") -> None:
    """Raises unless ``count`` is an int from 0 to 2^40, a number of ``what``."""
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{name} must be {kind}, got {type(count).__name__}")
    if not 0 <= count <= _MAX_ROWS:
        limit = "at least 0" if count < 0 else "at most 2^40"
        raise ValueError(f"{name} must be a number of {what}, {limit}, got {shown(count)}")


def parts_of(rays: int, segments_per_ray: int = 1) -> int:
    """Returns the number of parts into which packing divides the segments of all rays; each part has its own sum."""
    segments, unit = rays * segments_per_ray, max(constants.PART_RAYS * segments_per_ray, constants.PART_SEGMENTS)
    length = unit * max(1, -(-segments // (unit * constants.MAX_PARTS)))
    return max(1, -(-segments // length))


def empty_samples(like: Tensor, rays: int, capacity: int) -> tuple[Tensor, ...]:
    """Returns the fields of PackedSamples for a compiler: shapes and dtypes without values."""
    floats = (like.new_empty(shape, dtype=torch.float32) for shape in ((capacity, 3), (capacity,), (capacity,)))
    integers = (like.new_empty(size, dtype=torch.int64) for size in (capacity, rays + 1, 1))
    return *floats, *integers
