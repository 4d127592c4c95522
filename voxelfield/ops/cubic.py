"""Cubic interpolation along one, two or three axes: by B-splines, or by the convolution of ``F.grid_sample``."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from voxelfield.foundation.checks import FLOATING, check_choice, check_dense, check_dtype, truth_of
from voxelfield.foundation.errors import ArgumentValueError, shown
from voxelfield.ops._grids import PADDINGS, Padding
from voxelfield.ops._separable import as_complex, as_real, prefilter, sample_along

CubicKernel = Literal["bspline", "convolution"]
CUBIC_KERNELS: tuple[str, ...] = ("bspline", "convolution")


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
    ``align_corners``, they give the values, at the outermost vertices too. Each axis is solved exactly, by elimination,
    or with ``"periodic"`` by a recursive filter (Unser 1999).

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
    if grid.is_complex():
        return as_complex(bspline_prefilter(as_real(grid), axes, padding=padding, align_corners=align_corners))
    check_dtype("grid", grid, FLOATING)
    if 0 in grid.shape[-axes - 1 : -1]:
        raise ArgumentValueError(f"grid must have 1 to 2^30 vertices along each axis, got shape {tuple(grid.shape)}")
    filtered: Tensor = prefilter(grid, axes, PADDINGS[padding], truth_of("align_corners", align_corners), False)
    return filtered
