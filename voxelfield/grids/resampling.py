"""Resampling of grids and of the matching optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from voxelfield import ops
from voxelfield.ops._checks import coordinate_dtype
from voxelfield.ops._errors import ArgumentValueError
from voxelfield.ops._grids import Padding

# Fraction of a cell: a face of a cropping box that is this close to a vertex counts as lying on it. The tolerance is
# far above the rounding of float32 world coordinates and far below anything visible.
_SNAP_TOLERANCE = 1e-3
SLAB_ELEMENTS = 1 << 24
"""Elements of a temporary tensor (64 MiB of float32): passes over a whole grid work slab by slab, so that their
temporaries stay this small for any grid."""


def touched_vertices(low: float, high: float, size: int, wanted_low: float, wanted_high: float) -> tuple[int, int]:
    """Returns the first and last vertex of the cells that an interval touches, on an axis from low to high."""
    if size == 1:
        return 0, 0
    cell = (high - low) / (size - 1)
    first = max(math.floor((wanted_low - low) / cell + _SNAP_TOLERANCE), 0)
    last = min(math.ceil((wanted_high - low) / cell - _SNAP_TOLERANCE), size - 1)
    # An interval within the tolerance of a single vertex would be reduced to that vertex; keep at least one cell.
    first = min(first, size - 2)
    return first, max(last, first + 1)


def resample(
    values: Tensor,
    resolution: tuple[int, int, int],
    slab_elements: int = SLAB_ELEMENTS,
    *,
    align_corners: bool = True,
    periodic: bool = False,
) -> Tensor:
    """Resamples (X, Y, Z, C) trilinearly to other numbers of vertices over the same box.

    With ``align_corners`` the outermost vertices stay in place. Otherwise, new vertices may lie outside the old ones;
    there the outermost values are repeated, or the whole grid if it is ``periodic``. No temporary tensor has more than
    ``slab_elements`` elements, unless the vertices at one x need more.
    """
    _, y, z, channels = values.shape
    new_x, new_y, new_z = resolution
    result = values.new_empty((*resolution, channels))
    row = max(y * z, new_y * z, new_y * new_z) * channels
    placed = (align_corners, periodic)
    for rows in _slabs(new_x, row, slab_elements):
        slab = _resample_axis(values, 0, torch.arange(rows.start, rows.stop), new_x, *placed)
        slab = _resample_axis(slab, 1, torch.arange(new_y), new_y, *placed)
        slab = _resample_axis(slab, 2, torch.arange(new_z), new_z, *placed)
        result[rows] = slab
    return result


def _resample_axis(
    values: Tensor, axis: int, index: Tensor, new_size: int, align_corners: bool, periodic: bool
) -> Tensor:
    """Returns the values at the new vertices ``index`` of ``new_size`` along one axis, in the arithmetic's dtype."""
    size, dtype = values.shape[axis], coordinate_dtype(values.dtype)
    if not align_corners:
        position, unit = (2 * index + 1) * size - new_size, 2 * new_size
    elif new_size > 1:
        position, unit = index * (size - 1), new_size - 1
    else:
        # A single vertex represents the whole extent, so its value is that of the middle.
        position, unit = torch.tensor([size - 1]), 2
    lower = position // unit
    upper = lower + 1
    lower, upper = (i.remainder(size) if periodic else i.clamp(0, size - 1) for i in (lower, upper))
    weight = ((position % unit).to(dtype) / unit).reshape([-1 if d == axis else 1 for d in range(4)])
    below = values.index_select(axis, lower.to(values.device)).to(dtype)
    above = values.index_select(axis, upper.to(values.device)).to(dtype)
    return below.lerp_(above, weight.to(values.device))


def vertex_fractions(size: int, like: Tensor, align_corners: bool = True) -> Tensor:
    """Returns the relative positions of an axis' vertices between its ends, in the dtype and device of ``like``."""
    index = torch.arange(size, device=like.device, dtype=like.dtype)
    if not align_corners:
        return (index + 0.5) / size
    return index / (size - 1) if size > 1 else torch.full_like(index, 0.5)


def sample_vertices(
    values: Tensor,
    corners: Tensor,
    resolution: tuple[int, int, int],
    slab_elements: int = SLAB_ELEMENTS,
    *,
    align_corners: bool = True,
    periodic: bool = False,
) -> Tensor:
    """Samples (X, Y, Z, C) at the vertices that fill a box given by its corners (2, 3) in the unit cube.

    The options are as for :func:`resample`.
    """
    result = values.new_empty((*resolution, values.shape[-1]))
    axes = []
    for axis, size in enumerate(resolution):
        axes.append(torch.lerp(corners[0, axis], corners[1, axis], vertex_fractions(size, corners, align_corners)))
    padding: Padding = "periodic" if periodic else "border"
    for rows in _slabs(resolution[0], resolution[1] * resolution[2] * max(values.shape[-1], 3), slab_elements):
        points = torch.stack(torch.meshgrid(axes[0][rows], axes[1], axes[2], indexing="ij"), dim=-1)
        result[rows] = ops.sample_trilinear(values, points, padding=padding, align_corners=align_corners)
    return result


def _slabs(rows: int, row_elements: int, slab_elements: int) -> Iterator[slice]:
    step = max(slab_elements // max(row_elements, 1), 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def migratable_state(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Returns the optimizer's state for a parameter, and the keys of the entries that have the parameter's shape."""
    if not any(held is parameter for group in optimizer.param_groups for held in group["params"]):
        raise ArgumentValueError(
            "optimizer must hold this grid's features in one of its parameter groups, but does not"
        )
    if parameter not in optimizer.state:
        return {}, []
    state = optimizer.state[parameter]
    shaped = []
    for key, value in state.items():
        follows = isinstance(value, Tensor) and value.shape == parameter.shape
        if not isinstance(value, Tensor) or (value.numel() == 1 and not follows):
            continue
        if not follows or not value.is_floating_point():
            raise ArgumentValueError(
                f"optimizer: {type(optimizer).__name__} keeps {key!r} as {value.dtype} of shape "
                f"{tuple(value.shape)}, which cannot follow features of shape {tuple(parameter.shape)}. "
                "To restart this grid's optimization, drop it first with `del optimizer.state[grid.features]`"
            )
        shaped.append(key)
    return state, shaped
