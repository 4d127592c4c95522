"""Running sums and products along rays."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield import ops
from voxelfield.compat.nerfacc.pack import offsets_of


def inclusive_sum(inputs: Tensor, packed_info: Tensor | None = None) -> Tensor:
    """Sums up to each sample of its ray.

    Args:
        inputs: (all_samples,) floating, or of any shape without ``packed_info``; then rays lie along the last
            dimension. Differentiable any number of times.
        packed_info: (n_rays, 2) first sample and number of samples of each ray, in the order of the samples.

    Returns:
        The shape of ``inputs``; packed 16-bit values are summed and returned in float32.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has the wrong shape; or, on the CPU, rays overlap or leave the samples.
    """
    if packed_info is None:
        return inputs.cumsum(dim=-1)
    return ops.inclusive_sum(inputs, _offsets(inputs, packed_info))


def exclusive_sum(inputs: Tensor, packed_info: Tensor | None = None) -> Tensor:
    """Sums the samples before each one on its ray: 0 for the first.

    Arguments, result and errors are as for :func:`inclusive_sum`.
    """
    if packed_info is None:
        return torch.cat((torch.zeros_like(inputs[..., :1]), inputs[..., :-1]), dim=-1).cumsum(dim=-1)
    return ops.exclusive_sum(inputs, _offsets(inputs, packed_info))


def inclusive_prod(inputs: Tensor, packed_info: Tensor | None = None) -> Tensor:
    """Multiplies up to each sample of its ray. The gradient is right where inputs are zero, too.

    Arguments, result and errors are as for :func:`inclusive_sum`.
    """
    if packed_info is None:
        return inputs.cumprod(dim=-1)
    return ops.inclusive_prod(inputs, _offsets(inputs, packed_info))


def exclusive_prod(inputs: Tensor, packed_info: Tensor | None = None) -> Tensor:
    """Multiplies the samples before each one on its ray: 1 for the first.

    Arguments, result and errors are as for :func:`inclusive_sum`. The gradient is right where inputs are zero, too.
    """
    if packed_info is None:
        return torch.cat((torch.ones_like(inputs[..., :1]), inputs[..., :-1]), dim=-1).cumprod(dim=-1)
    return ops.exclusive_prod(inputs, _offsets(inputs, packed_info))


def _offsets(inputs: Tensor, packed_info: Tensor) -> Tensor:
    if inputs.dim() != 1:
        raise ValueError(f"inputs must have shape (all_samples,) with packed_info, got {tuple(inputs.shape)}")
    return offsets_of(packed_info, None, None, inputs)
