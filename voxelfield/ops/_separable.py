"""The raw ops of separable kernels along one, two or three axes: options, shapes, derivatives, complex numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.foundation.checks import FLOATING, INTEGERS, check_dtype, check_field, check_tensor, coordinate_dtype
from voxelfield.ops._derivatives import Shapes, Stencil, declare_lookups, declare_splat
from voxelfield.ops._grids import MODES, as_rows, check_vertices, grid_options, sample_lookup, value_and_gradient

KERNELS: dict[str, int] = {"nearest": 0, "linear": 1, "convolution": 2, "bspline": 3}

# kernel, padding, align_corners, planar, normalized, with_gradient, as in the schemas.
Options = tuple[int, int, bool, bool, bool, bool]


@dataclass(frozen=True)
class SeparableStencil(Stencil):
    """A :class:`voxelfield.ops._derivatives.Stencil` of kernels that are products over the axes."""

    of_grids = True
    gather = "sample_separable"
    point_gradient = "point_gradient_separable"
    subject = "sampling by separable kernels"

    @property
    def planar(self) -> bool:
        """Whether channels come before the axes of sources, and before the points in values."""
        return bool(self.options[3])

    def splat(self, values: Tensor, points: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
        """Adds ``values`` up in one grid."""
        last = points.shape[-1] + int(not self.planar)
        size = list(shapes[0][len(shapes[0]) - last :][: points.shape[-1]])
        return (_splat.raw(values, points, size, *self.options, whole_scale(values, size, self.options[-1])),)


@functools.cache
def separable_stencil(*options: bool) -> SeparableStencil:
    """Returns the stencil of :data:`Options`."""
    return SeparableStencil(options)


def whole_scale(values: Tensor, size: Sequence[int], with_gradient: bool) -> Tensor | None:
    """Returns how many whole numbers make one in reproducible sums on CUDA; None if these are not asked for.

    The largest power of two with which no sum overflows. Terms are thus rounded to 2^-61 of the largest possible sum.
    """
    if not (values.is_cuda and torch.are_deterministic_algorithms_enabled() and values.numel()):
        return None
    # No weight exceeds 1, and no slope of a weight twice the number of vertices.
    largest = 1 + 2 * len(size) * max(size) if with_gradient else 1
    bound = values.detach().abs().amax().double() * (values.numel() * largest)
    return torch.exp2(61 - bound.clamp_min(2.0**-900).log2().ceil())


def separable_options(
    kernel: str, padding: str, align_corners: bool, with_gradient: bool, planar: bool = False, normalized: bool = False
) -> Options:
    """Checks the options of a public function and returns those of the raw ops."""
    mode = "nearest" if kernel == "nearest" else "linear"
    outside, corners, *_, gradient = grid_options(padding, align_corners, mode, False, with_gradient)
    return KERNELS[kernel], outside, corners, planar, normalized, gradient


def sample_along(
    grid: Tensor, points: Tensor, kernel: str, padding: str, align_corners: bool, with_gradient: bool
) -> Any:
    """Samples a grid of as many axes as points have coordinates, by a kernel of :data:`KERNELS`."""
    options = separable_options(kernel, padding, align_corners, with_gradient)
    if isinstance(grid, Tensor) and grid.is_complex():
        return complex_results(sample_along(as_real(grid), points, kernel, padding, align_corners, with_gradient))
    axes = axes_of(points)
    source, rows = as_rows(grid, points, axes)
    of_volume = (*options[1:3], kernel == "nearest", False, options[-1])
    if axes == 3 and kernel in MODES:
        sampled: Tensor = sample_lookup((source,), rows, *of_volume)
    elif kernel == "nearest" and isinstance(grid, Tensor) and grid.dtype in INTEGERS:
        # The kernels along three axes copy integers. A further axis of one vertex changes nothing.
        volume = source.unflatten(-1, (*[1] * (3 - axes), -1))
        sampled = sample_lookup((volume,), F.pad(rows, (0, 3 - axes), value=0.5), *of_volume)
    else:
        sampled = sample_separable(source, rows, *options)
    if rows is not points and rows.shape[:-1] != points.shape[:-1]:
        sampled = sampled.view(*sampled.shape[: sampled.dim() - rows.dim()], *points.shape[:-1], sampled.shape[-1])
    return value_and_gradient(sampled) if options[-1] else sampled


def axes_of(points: Tensor) -> int:
    """Returns the number of coordinates of points, 1 to 3; 3 for what are no points, which the kernels refuse."""
    return points.shape[-1] if isinstance(points, Tensor) and points.dim() and 1 <= points.shape[-1] <= 3 else 3


def as_real(values: Tensor) -> Tensor:
    """Returns complex channels as twice as many real ones, side by side: (..., C) as (..., 2 C)."""
    return torch.view_as_real(values.resolve_conj()).flatten(-2)


def as_complex(values: Tensor, axis: int = -1) -> Tensor:
    """Returns what :func:`as_real` was made of; channels are along ``axis``, counted from the last one, -1."""
    pairs = values.unflatten(axis, (values.shape[axis] // 2, 2)).movedim(axis, -1)
    return torch.view_as_complex(pairs.contiguous())


def complex_results(sampled: Any) -> Any:
    """Returns what was sampled from complex channels, with gradient or without, given what was sampled as real."""
    if isinstance(sampled, Tensor):
        return as_complex(sampled)
    value, gradient = sampled
    return as_complex(value), as_complex(gradient, -2)


def _check(grid: Tensor, points: Tensor, planar: bool) -> None:
    """Raises unless grid and points fit together, and kernels exist for their dtype."""
    axes, batch = axes_of(points), ("B",) if isinstance(points, Tensor) and points.dim() == 3 else ()
    along = "XYZ"[:axes]
    check_tensor("grid", grid, (*batch, "C", *along) if planar else (*batch, *along, "C"))
    check_dtype("grid", grid, FLOATING)
    check_vertices("grid", grid, grid.shape[-axes:] if planar else grid.shape[-axes - 1 : -1])
    shape = (*grid.shape[: len(batch)], "N", axes)
    check_field("points", points, shape, coordinate_dtype(grid.dtype), "grid", grid)


def _sampled(grid: Tensor, points: Tensor, planar: bool, with_gradient: bool) -> Tensor:
    sets = (1 + points.shape[-1],) if with_gradient else ()
    *batch, count = points.shape[:-1]
    channels = grid.shape[len(batch)] if planar else grid.shape[-1]
    return grid.new_empty(*sets, *batch, *((channels, count) if planar else (count, channels)))


def _sum_shape(values: Sequence[int], points: Sequence[int], size: Sequence[int], planar: bool) -> tuple[int, ...]:
    channels = values[-2] if planar else values[-1]
    return (*points[:-2], channels, *size) if planar else (*points[:-2], *size, channels)


sample_separable = declare_lookups(SeparableStencil, separable_stencil, results=_sampled, check=_check)
_splat = declare_splat(
    "splat_separable",
    lambda values, points, size, *options: (
        separable_stencil(*options[:-1]),
        (_sum_shape(values, points, size, options[3]),),
    ),
    lambda sums: sums[0],
    lambda values, points, size, planar: values.new_empty(_sum_shape(values.shape, points.shape, size, planar)),
)


def splat_separable(values: Tensor, points: Tensor, size: Sequence[int], options: Options) -> Tensor:
    """Adds values (N, C) up in a new grid, or those of a batch in as many grids."""
    summed: Tensor = _splat(values, points, list(size), *options, whole_scale(values, size, False))
    return summed
