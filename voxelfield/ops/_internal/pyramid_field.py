"""Arguments shared by the ops that march through a pyramid of grids with a density network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield.ops import _constants
from voxelfield.ops._checks import check_dtype, check_float32, check_same_device, check_tensor

MAX_NUMBERS = 2**31  # A level must have fewer elements than this, because offsets into it are 32-bit.


def check_pyramid_field(
    levels: Sequence[Tensor],
    aabb: Tensor,
    density_weights: Sequence[Tensor],
    density_initial: float,
    device_of: str,
    like: Tensor,
    blocks: Sequence[Tensor | None] = (),
) -> None:
    """Raises unless levels, tables, box and density network are valid for the kernels, on the device of ``like``."""
    if isinstance(levels, Tensor) or not isinstance(levels, Sequence):
        raise TypeError(f"levels must be a sequence of torch.Tensors, got {type(levels).__name__}")
    if not 1 <= len(levels) <= _constants.MAX_FIELD_LEVELS:
        raise ValueError(f"levels must be 1 to {_constants.MAX_FIELD_LEVELS} tensors, got {len(levels)}")
    allowed = (torch.float16,) if like.is_cuda else (torch.float32, torch.float16, torch.bfloat16)
    for index, level in enumerate(levels):
        name = f"levels[{index}]"
        check_tensor(name, level, ("X", "Y", "Z", _constants.LEVEL_CHANNELS))
        check_dtype(name, level, allowed if index == 0 else (levels[0].dtype,), " on CUDA" if like.is_cuda else "")
        check_same_device(name, level, device_of, like)
        if not 0 < level.numel() < MAX_NUMBERS:
            raise ValueError(f"{name} must have 1 to 2^31 - 1 numbers, got shape {tuple(level.shape)}")
    if blocks and len(blocks) != len(levels):
        raise ValueError(f"blocks must be none or one for each of {len(levels)} levels, got {len(blocks)}")
    for index, table in enumerate(blocks):
        if table is not None:
            check_tensor(f"blocks[{index}]", table, ("X", "Y", "Z"))
            check_dtype(f"blocks[{index}]", table, (torch.int32,))
            check_same_device(f"blocks[{index}]", table, device_of, like)
    check_float32("aabb", aabb, (2, 3), device_of, like)
    check_network("density_weights", density_weights, _constants.LEVEL_CHANNELS * len(levels), 2, device_of, like)
    if not 0 < density_initial <= torch.finfo(torch.float32).max:
        raise ValueError(f"density_initial must be positive and finite, got {density_initial}")


def check_network(
    name: str, weights: Sequence[Tensor], inputs: int, max_layers: int, device_of: str, like: Tensor
) -> None:
    """Raises unless the marching kernels can evaluate a network with these weights."""
    if isinstance(weights, Tensor) or not isinstance(weights, Sequence):
        raise TypeError(f"{name} must be a sequence of torch.Tensors, got {type(weights).__name__}")
    if not 2 <= len(weights) <= max_layers:
        wanted = "2" if max_layers == 2 else f"2 to {max_layers}"
        raise ValueError(f"{name} must be {wanted} tensors, got {len(weights)}")
    columns = inputs
    for layer, weight in enumerate(weights):
        own = f"{name}[{layer}]"
        check_tensor(own, weight, ("out", columns))
        check_dtype(own, weight, (torch.float32, torch.float16) if layer == 0 else (weights[0].dtype,))
        check_same_device(own, weight, device_of, like)
        max_rows = _constants.MAX_GEOMETRY if layer == len(weights) - 1 else _constants.MAX_WIDTH
        if not 1 <= weight.shape[0] <= max_rows:
            raise ValueError(f"{own} must have 1 to {max_rows} rows, got shape {tuple(weight.shape)}")
        columns = weight.shape[0]
