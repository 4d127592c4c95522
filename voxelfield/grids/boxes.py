"""Axis-aligned boxes in world units: as numbers, which outlive a move to the meta device, as tensors, and in cells."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor

from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError, shown

Box = tuple[tuple[float, ...], tuple[float, ...]]
"""Lower and upper corner, three numbers each unless they are those of a grid of fewer axes, exact in float32."""


PER_AXIS = ("one for x", "two for x and y", "three for x, y and z")
"""How many numbers a grid of one, two or three axes takes, for messages."""


def parse_box(aabb: Sequence[Sequence[float]] | Tensor, name: str = "aabb", axes: Sequence[int] = (3,)) -> Box:
    """Returns the corners of a box (2, 3), rounded to float32; raises ValueError unless it is one, with finite corners.

    ``axes`` are the numbers of coordinates that a corner may have.

    Does not read values through torch, so boxes can be given as numbers even where torch computes no values: under
    ``torch.device("meta")`` and under ``FakeTensorMode``. ``name`` is that of the box, for messages.
    """
    corners: Any = aabb
    try:
        if isinstance(aabb, Tensor):
            corners = aabb.detach().tolist()
        low, high = (tuple(c_float(float(value)).value for value in corner) for corner in corners)
        if len(low) != len(high) or len(low) not in axes:
            raise ValueError("a corner has another number of coordinates")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentValueError(
            f"{name} must be two corners of three numbers each, shape (2, 3), got {shown(corners)}"
        ) from error
    if not (all(map(math.isfinite, (*low, *high))) and all(a < b for a, b in zip(low, high, strict=True))):
        raise ArgumentValueError(f"{name} must be finite with low < high along every axis, got {[[*low], [*high]]}")
    return low, high


def length_unit(box: Box) -> float:
    """Returns a power of the root of 2 in proportion to a box: 1 for longest edges of 2.15 to 3.03, such as Lego's."""
    return 2.0 ** (round(2 * math.log2(max(box_extent(box)) / 2.55)) / 2)


def box_extent(box: Box) -> tuple[float, ...]:
    """Returns the lengths of a box along x, y and z, rounded to float32."""
    low, high = box
    return tuple(c_float(b - a).value for a, b in zip(low, high, strict=True))


def box_tensor(box: Box, device: torch.device) -> Tensor:
    """Returns a box as a (2, 3) float32 tensor."""
    return torch.tensor(box, dtype=torch.float32, device=device)


def check_box(name: str, aabb: Tensor) -> None:
    """Raises ValueError unless a tensor from a file is a box: (2, 3) float32, finite, low < high along every axis."""
    if aabb.dtype != torch.float32 or aabb.shape != (2, 3):
        raise ValueError(f"{name} must be float32 of shape (2, 3), got {aabb.dtype} of shape {tuple(aabb.shape)}")
    parse_box(aabb, name)


def parse_size(name: str, value: Any) -> int:
    """Returns a number of vertices, cells or channels; raises unless it is an integer of at least 1."""
    try:
        size = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name} must be integer, got {shown(value)}") from None
    if size < 1 or isinstance(value, bool):
        raise ArgumentValueError(f"{name} must be at least 1, got {shown(value)}")
    if size >= 1 << 31:
        raise ArgumentValueError(f"{name} must be at most 2^31 - 1, got {shown(value)}")
    return size


def parse_resolution(resolution: int | Sequence[int], axes: int = 3) -> tuple[int, ...]:
    """Returns numbers of vertices or cells along x, y and z, of which one may stand for all; raises as above."""
    try:
        sizes: tuple[Any, ...] = tuple(resolution)  # type: ignore[arg-type]
    except TypeError:
        sizes = (resolution,) * axes
    if len(sizes) != axes:
        raise ArgumentValueError(f"resolution must be one int, or {PER_AXIS[axes - 1]}, got {shown(resolution)}")
    return tuple(parse_size("resolution", size) for size in sizes)


def cell_indices(flat: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns indices along x, y, z of flat indices (M,); does not synchronise, as ``torch.unravel_index`` would."""
    _, y, z = shape
    return flat // (y * z), flat // z % y, flat % z


def flat_indices(indices: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns the flat indices (...) of indices (..., 3) along x, y and z, the inverse of :func:`cell_indices`."""
    x, y, z = indices.unbind(-1)
    return (x * shape[1] + y) * shape[2] + z
