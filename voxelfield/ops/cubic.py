"""Cubic interpolation along one, two or three axes: by B-splines, or by the convolution of ``F.grid_sample``."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from voxelfield.foundation.checks import FLOATING, check_choice, check_dense, check_dtype, coordinate_dtype, truth_of
from voxelfield.foundation.errors import ArgumentValueError, shown
from voxelfield.ops._grids import PADDINGS, Padding, check_vertices
from voxelfield.ops._separable import sample_along

CubicKernel = Literal["bspline", "convolution"]
CUBIC_KERNELS: tuple[str, ...] = ("bspline", "convolution")

# Coefficients are the values filtered recursively in both directions with this pole. That takes five steps of twice the
# length each, because further terms of the impulse response change no digit of a float64.
_POLE = math.sqrt(3) - 2
_STEPS = (1, 2, 4, 8, 16)
_REACH = sum(_STEPS)


@overload
def sample_cubic(
    grid: Tensor,
    points: Tensor,
    kernel: CubicKernel = ...,
    *,
    padding: Padding = ...,
    align_corners: bool = ...,
    with_gradient: Literal[False] = ...,
) -> Tensor: ...
@overload
def sample_cubic(
    grid: Tensor,
    points: Tensor,
    kernel: CubicKernel = ...,
    *,
    padding: Padding = ...,
    align_corners: bool = ...,
    with_gradient: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def sample_cubic(
    grid: Tensor,
    points: Tensor,
    kernel: CubicKernel = "bspline",
    *,
    padding: Padding = "border",
    align_corners: bool = True,
    with_gradient: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Samples a dense grid at points by a cubic kernel along each axis, of four vertices: 4, 16 or 64 in all.

    Args:
        grid: (X, Y, Z, C), (X, Y, C) or (X, C), channels last, or a batch with a leading B; as many axes as points have
            coordinates. float32, float64, float16, bfloat16, complex64 or complex128, on CPU or CUDA. An expanded batch
            is treated as by :func:`voxelfield.ops.sample_trilinear`.
        points: (..., D) in the unit cube, or (B, ..., D) for a batch, with D = 3, 2 or 1; otherwise as for
            :func:`voxelfield.ops.sample_trilinear`.
        kernel: ``"bspline"``: the grid holds the coefficients of cubic B-splines. The result is twice continuously
            differentiable; it takes given values at the vertices if the coefficients are those of
            :func:`voxelfield.ops.bspline_prefilter`, and smooths them if the coefficients are the values themselves.
            ``"convolution"``: Keys' kernel with a = -0.75, the ``"bicubic"`` of ``F.grid_sample``. It takes the
            values of the grid at the vertices, and is once continuously differentiable.
        padding: Which vertices take the place of those beyond the grid, as for
            :func:`voxelfield.ops.sample_trilinear`. Each of the four vertices of an axis is replaced separately, so
            that with ``"border"`` the result becomes constant two cells beyond the outermost vertices.
        align_corners: As for :func:`voxelfield.ops.sample_trilinear`.
        with_gradient: Whether to also return the derivative with respect to the point, from the same pass.

    Returns:
        (..., C), or (B, ..., C) for a batch, in the grid's dtype; the arithmetic is at least float32. Differentiable
        twice with respect to both ``grid`` and ``points``, also by ``torch.func``.

        With ``with_gradient``, a pair of this and its gradient (..., C, D), in unit coordinates. Both are
        differentiable once.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or is on another device, or an option is unknown.
        NotImplementedError: A third derivative is requested, or a second one with ``with_gradient``.
    """
    check_choice("kernel", kernel, CUBIC_KERNELS)
    return sample_along(grid, points, kernel, padding, align_corners, with_gradient)


def bspline_prefilter(
    grid: Tensor, dimensions: int | None = None, *, padding: Padding = "border", align_corners: bool = True
) -> Tensor:
    """Returns the coefficients of the cubic B-splines that take given values at the vertices.

    Sampled by :func:`voxelfield.ops.sample_cubic` with ``kernel="bspline"`` and the same ``padding`` and
    ``align_corners``, they give the values, at the outermost vertices too. Each axis is filtered recursively (Unser
    1999), continued beyond its ends as ``padding`` continues the coefficients.

    Args:
        grid: (..., X, Y, Z, C), (..., X, Y, C) or (..., X, C) values, of the dtypes of
            :func:`voxelfield.ops.sample_cubic`. Leading dimensions are batches.
        dimensions: The number of axes, 1 to 3. None means that there is no batch, or for a grid of five dimensions
            that it is a batch of volumes.
        padding: As for :func:`voxelfield.ops.sample_cubic`.
        align_corners: See ``padding``; matters for ``"reflection"`` only.

    Returns:
        Coefficients in the shape and dtype of ``grid``. Linear in it, and differentiable any number of times.

    Raises:
        TypeError: ``grid`` is not a tensor, or has the wrong dtype.
        ValueError: ``grid`` has too few dimensions or an axis without vertices, or an option is unknown.
    """
    check_dense("grid", grid)
    check_choice("padding", padding, PADDINGS)
    axes = min(grid.dim() - 1, 3) if dimensions is None else dimensions
    if axes not in (1, 2, 3) or isinstance(axes, bool) or axes >= grid.dim():
        raise ArgumentValueError(
            f"dimensions must be 1, 2 or 3, and less than grid has, {grid.dim()}, got {shown(dimensions)}"
        )
    if not grid.is_complex():
        check_dtype("grid", grid, FLOATING)
    check_vertices("grid", grid, grid.shape[-axes - 1 : -1])
    mirrors = padding == "reflection" and truth_of("align_corners", align_corners)
    filtered = grid if grid.is_complex() else grid.to(coordinate_dtype(grid.dtype))
    for axis in range(grid.dim() - 1 - axes, grid.dim() - 1):
        filtered = _filtered(filtered, axis, padding, mirrors)
    return (filtered * (-6 * _POLE) ** axes).to(grid.dtype)


def _filtered(values: Tensor, axis: int, padding: str, mirrors: bool) -> Tensor:
    """Filters along an axis, up to the factor of the result; see :func:`_beyond` for the arguments."""
    low, high = (_beyond(values, axis, first, padding, mirrors) for first in (-_REACH, values.shape[axis]))
    filtered = torch.cat((low, values, high), axis)
    for backwards in (False, True):
        for step in _STEPS:
            before, after = (filtered.narrow(axis, at, filtered.shape[axis] - step) for at in (0, step))
            first, second = (before, after) if backwards else (after, before)
            filtered = torch.add(first, second, alpha=_POLE**step)
    return filtered


def _beyond(values: Tensor, axis: int, first: int, padding: str, mirrors: bool) -> Tensor:
    """Returns the values from index ``first`` on, outside of the axis, that make its coefficients go on as padded.

    ``mirrors`` says whether the grid is mirrored at its outermost vertices. All other reflections are half a cell
    beyond them, where coefficients that are repeated once, which are all that count, are mirrored too.
    """
    size, index = values.shape[axis], torch.arange(first, first + _REACH, device=values.device)
    if padding == "periodic":
        return values.index_select(axis, index % size)
    # If the coefficients next to the outermost ones are zero, the values are odd about these.
    odd = int(padding == "zeros")
    at_vertices = bool(odd) or mirrors
    period = max(2 * (size - 1 + 2 * odd), 1) if at_vertices else 2 * size
    phase = (index + odd) % period
    vertex = torch.minimum(phase, period - int(not at_vertices) - phase) - odd
    found = values.index_select(axis, vertex.clamp(0, size - 1))
    if not odd:
        return found
    sign = torch.sign(phase * (size + 1 - phase)).to(found.dtype)
    return found * sign.view(-1, *[1] * (values.dim() - 1 - axis))
