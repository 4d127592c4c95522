"""Conversion of ray indices to the form that names the samples of each ray."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from voxelfield import ops
from voxelfield.foundation.checks import check_tensor, offsets_fit


@torch.no_grad()
def pack_info(ray_indices: Tensor, n_rays: int | None = None) -> Tensor:
    """Returns the first sample of each ray and the number of its samples.

    Args:
        ray_indices: (all_samples,) int64 or int32, never falling; checked on the CPU only.
        n_rays: Number of rays. None for one more than the highest index, which synchronises with the device.

    Returns:
        (n_rays, 2) in the dtype of ``ray_indices``.

    Raises:
        TypeError: ``ray_indices`` is not a tensor of integers.
        ValueError: ``ray_indices`` has another shape; or, on the CPU, falls or leaves 0..n_rays - 1.
    """
    return ops.pack_info(ray_indices, ray_count(ray_indices, n_rays)).to(ray_indices.dtype)


def ray_count(ray_indices: Tensor, n_rays: int | None) -> int:
    """Returns ``n_rays``, or if it is None the least number of rays that have these indices."""
    if n_rays is not None:
        return n_rays
    return int(ray_indices.max()) + 1 if ray_indices.numel() else 0


def offsets_of(packed_info: Tensor | None, ray_indices: Tensor | None, n_rays: int | None, like: Tensor) -> Tensor:
    """Returns offsets (rays + 1,) int64 into the flattened samples, from whichever form describes ``like``.

    Args:
        packed_info: As :func:`pack_info` returns it, with rays in the order of their samples; checked on the CPU only.
            Samples that belong to no ray become additional rays.
        ray_indices: As for :func:`pack_info`; ignored if there is a ``packed_info``.
        n_rays: As for :func:`pack_info`.
        like: (all_samples,); or of any other shape, with samples along the last dimension, if neither of the others is
            given.
    """
    if packed_info is not None:
        check_tensor("packed_info", packed_info, ("n_rays", 2))
        if packed_info.shape[0] == 0:
            return packed_info.new_zeros(1, dtype=torch.int64)
        begins, counts = packed_info.long().unbind(dim=1)
        offsets = torch.stack((begins, begins + counts), dim=1).flatten()
        if not offsets_fit(offsets, like.shape[0]):
            raise ValueError(
                f"packed_info must list rays in the order of their samples, within the {like.shape[0]} samples"
            )
        return offsets
    if ray_indices is not None:
        return ops.offsets_from_ray_index(ray_indices, ray_count(ray_indices, n_rays))
    if like.dim() == 0:
        raise ValueError("samples must have at least one dimension, got none")
    return torch.arange(math.prod(like.shape[:-1]) + 1, device=like.device) * like.shape[-1]
